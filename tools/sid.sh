# Debian's unstable suite beside a machine's own release, for scripts to source: LLVM and Mesa are taken from
# there. The machine's lists and packages stay as they are.

# The Debian archive that this machine already uses.
debian_archive() {
    local archive
    archive=$(sed -nE 's#^(URIs: *|deb +(\[[^]]*\] +)?)(https?://[^ ]+/debian)/?( .*)?$#\3#p' \
        /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null | head -1 || true)
    echo "${archive:-http://deb.debian.org/debian}"
}

# sid_apt WORK ARGUMENT ...: apt-get for that suite as on a machine without any package, which keeps what it
# downloads in WORK/cache/archives.
sid_apt() {
    local work=$1
    shift
    local options=(-qq -o "Dir::Etc::sourcelist=$work/sources.list" -o Dir::Etc::sourceparts=-
        -o "Dir::State::lists=$work/lists" -o "Dir::State::status=$work/status" -o "Dir::Cache=$work/cache"
        -o APT::Sandbox::User=root -o Debug::NoLocking=1)
    if [ ! -e "$work/sources.list" ]; then
        mkdir -p "$work"/{lists/partial,cache/archives/partial}
        touch "$work/status"
        echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $(debian_archive) sid main" \
            >"$work/sources.list"
        apt-get "${options[@]}" update
    fi
    apt-get "${options[@]}" "$@"
}
