//! The machine code in what `ptxas` writes: an ELF file with a section of code per function.

use thiserror::Error;

/// A cubin in another form than the one that is read here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("the cubin has no {0}: its format has changed, adapt the audit to it")]
pub struct CubinError(&'static str);

/// The code of all functions, one after the other as they lie in the file. Branches are relative, so
/// that it may be moved.
///
/// # Errors
///
/// If this is no 64-bit ELF file, or there is no code in it.
pub fn code(cubin: &[u8]) -> Result<Vec<u8>, CubinError> {
    const ELF64: &[u8] = b"\x7fELF\x02\x01";
    // Offsets of the header's fields and of those of a section: ELF-64 Object File Format, figures 2
    // and 4.
    const TABLE: usize = 0x28;
    const SIZE: usize = 0x3a;
    const COUNT: usize = 0x3c;
    const NAMES: usize = 0x3e;
    const SECTION_OFFSET: usize = 0x18;
    const SECTION_SIZE: usize = 0x20;

    if !cubin.starts_with(ELF64) {
        return Err(CubinError("header of a 64-bit ELF file"));
    }
    let missing = CubinError("section table");
    let number = |at: usize, bytes: usize| {
        let field = cubin.get(at..at.checked_add(bytes)?)?;
        let value = field.iter().rev().fold(0u64, |value, &byte| value << 8 | u64::from(byte));
        usize::try_from(value).ok()
    };
    let header = |at, bytes| number(at, bytes).ok_or(missing);
    let (table, size) = (header(TABLE, 8)?, header(SIZE, 2)?);
    let (count, names) = (header(COUNT, 2)?, header(NAMES, 2)?);
    let body = |index: usize| {
        let section = table.checked_add(index.checked_mul(size)?)?;
        let start = number(section + SECTION_OFFSET, 8)?;
        let body = cubin.get(start..start.checked_add(number(section + SECTION_SIZE, 8)?)?)?;
        Some((number(section, 4)?, body))
    };
    let (_, names) = body(names).ok_or(missing)?;
    let mut code = Vec::new();
    // A section without contents in the file, such as shared memory, may reach past its end.
    for (name, body) in (0..count).filter_map(body) {
        if names.get(name..).is_some_and(|name| name.starts_with(b".text.")) {
            code.extend_from_slice(body);
        }
    }
    if code.is_empty() { Err(CubinError("section of code")) } else { Ok(code) }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use rstest::rstest;

    use super::*;

    /// An ELF file with sections of these names and contents, its names last.
    fn elf(sections: &[(&str, &[u8])]) -> Vec<u8> {
        let mut names = vec![0];
        let mut bodies = Vec::new();
        let mut table = Vec::new();
        let mut section = |name: usize, body: &[u8]| {
            let mut entry = [0; 0x40];
            entry[..4].copy_from_slice(&(name as u32).to_le_bytes());
            entry[0x18..0x20].copy_from_slice(&(0x40 + bodies.len() as u64).to_le_bytes());
            entry[0x20..0x28].copy_from_slice(&(body.len() as u64).to_le_bytes());
            bodies.extend_from_slice(body);
            table.extend(entry);
        };
        for (name, body) in sections {
            section(names.len(), body);
            names.extend_from_slice(name.as_bytes());
            names.push(0);
        }
        section(0, &names);
        let mut file = vec![0; 0x40];
        file[..6].copy_from_slice(b"\x7fELF\x02\x01");
        file[0x28..0x30].copy_from_slice(&(0x40 + bodies.len() as u64).to_le_bytes());
        let [count, last] = [sections.len() + 1, sections.len()].map(|n| (n as u16).to_le_bytes());
        file[0x3a..0x3c].copy_from_slice(&0x40u16.to_le_bytes());
        file[0x3c..0x3e].copy_from_slice(&count);
        file[0x3e..0x40].copy_from_slice(&last);
        file.extend(bodies);
        file.extend(table);
        file
    }

    #[test]
    fn only_code_is_taken() {
        let file = elf(&[
            (".strtab", b"no"),
            (".text.a", b"one"),
            (".rela.text.a", b"no"),
            (".text.b", b"two"),
        ]);
        assert_eq!(code(&file).unwrap(), b"onetwo");
    }

    #[rstest]
    #[case::text(b"PTX".to_vec(), "ELF")]
    #[case::cut(elf(&[(".text.a", b"one")])[..0x50].to_vec(), "section table")]
    #[case::no_code(elf(&[(".strtab", b"no")]), "section of code")]
    fn another_file_is_told(#[case] file: Vec<u8>, #[case] missing: &str) {
        let error = code(&file).unwrap_err().to_string();
        assert!(error.contains(missing), "{error}");
    }
}
