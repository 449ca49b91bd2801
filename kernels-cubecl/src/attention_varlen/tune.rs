//! Measuring which tiles are the fastest.

use std::sync::Arc;

use cubecl::{
    AutotuneKey,
    client::Client,
    tune::{LocalTuner, Tunable, TunableSet, local_tuner},
};
use serde::{Deserialize, Serialize};

use super::{
    AttentionBlueprint, AttentionProblem, AttentionTensors,
    launch::{check, launch},
    tiling::tilings,
};
use crate::{DeviceWorkList, LaunchError};

/// What a measurement holds for. Token counts are rounded, so that a model that meets images of all
/// sizes measures a few times and not at each.
#[derive(AutotuneKey, Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(super) struct Key {
    /// Engine, dtype, head_dims, options and vectors, as blueprints print them, and the tilings to choose
    /// from.
    kernel: String,
    heads: usize,
    heads_per_kv: usize,
    #[autotune(anchor)]
    tokens_q: usize,
    #[autotune(anchor)]
    tokens_k: usize,
    /// Tokens of a segment, on average.
    #[autotune(anchor)]
    segment: usize,
}

impl Key {
    /// For kernels of a kind.
    pub(super) fn of(
        kind: String,
        launches: &[(String, Launch)],
        problem: &AttentionProblem,
        segments: usize,
    ) -> Self {
        let tilings: Vec<_> = launches.iter().map(|(tiling, _)| tiling.as_str()).collect();
        Self::new(
            format!("{kind}: {}", tilings.join(", ")),
            problem.heads(),
            problem.heads() / problem.heads_kv(),
            problem.tokens_q(),
            problem.tokens_k(),
            problem.tokens_q().div_ceil(segments.max(1)),
        )
    }
}

/// Measurements of one kind of kernels.
pub(super) type Tuner = LocalTuner<Key, String>;

/// Queues a kernel.
pub(super) type Launch = Arc<dyn Fn() -> Result<(), LaunchError> + Send + Sync>;

/// Cuts the work list for a number of rows per tile.
pub type CutWork = Arc<dyn Fn(usize) -> DeviceWorkList + Send + Sync>;

#[derive(Clone)]
struct Inputs {
    key: Key,
    /// With the names of their tilings.
    launches: Arc<[(String, Launch)]>,
}

/// Queues the fastest of the launches, which are for tilings by some of the names `tilings`. The first
/// call for a key on a device measures all of them.
pub(super) fn queue_fastest(
    tuner: &'static Tuner,
    tilings: fn() -> Vec<String>,
    client: &Client,
    key: Key,
    launches: Vec<(String, Launch)>,
) {
    let identity = &client.properties().identity;
    let device = format!("{} {}", identity.name, identity.fingerprint);
    let set = tuner.init(&device, move || tunables(tilings()));
    let inputs = Inputs { key, launches: launches.into() };
    tuner.execute(&device, client, set, inputs);
}

/// One for each tiling that there is: a problem has some of them.
fn tunables(tilings: Vec<String>) -> TunableSet<Key, Inputs, ()> {
    let mut set = TunableSet::new(
        |inputs: &Inputs| inputs.key.clone(),
        |_: &Key, inputs: &Inputs| inputs.clone(),
    );
    for tiling in tilings {
        set = set.with(Tunable::new(&tiling.clone(), move |inputs: Inputs| {
            let found = inputs.launches.iter().find(|(name, _)| *name == tiling);
            let (_, launch) = found.ok_or_else(|| "does not fit".to_owned())?;
            launch().map_err(|error| error.to_string())
        }));
    }
    set
}

/// Queues the fastest of the blueprints.
///
/// `blueprints` come from [`candidates`](super::candidates) for this client's device and this problem.
/// The first launch of its kind on a device measures all of them; the outcome is kept in `CubeCL`'s
/// cache, also on disk where the program's configuration of `CubeCL` says so. Tiles add up in
/// different orders: who needs the same bits from every machine and run launches the first
/// candidate.
///
/// `cut` makes the work list for a blueprint's [`tile_q`](AttentionBlueprint::tile_q), of this many
/// `segments`.
///
/// # Errors
///
/// As [`launch`](super::launch()).
///
/// # Panics
///
/// As [`launch`](super::launch()), and if there is no blueprint.
pub fn launch_fastest(
    client: &Client,
    problem: &AttentionProblem,
    blueprints: &[AttentionBlueprint],
    segments: usize,
    cut: CutWork,
    tensors: AttentionTensors,
) -> Result<(), LaunchError> {
    let first = blueprints.first().expect("blueprints: expected at least one, got none");
    if blueprints.len() == 1 || problem.tokens_q() == 0 {
        return launch(client, problem, first, &cut(first.tile_q()), tensors);
    }
    // What is wrong with the call is found here, not by each of the measurements.
    check(client, problem, first, &cut(first.tile_q()), &tensors)?;
    static TUNER: Tuner = local_tuner!();
    let launches = blueprints.iter().map(|&blueprint| {
        let (client, problem) = (client.clone(), *problem);
        let (cut, tensors) = (cut.clone(), tensors.clone());
        let run = move || {
            launch(&client, &problem, &blueprint, &cut(blueprint.tile_q()), tensors.clone())
        };
        (blueprint.tiling(), Arc::new(run) as Launch)
    });
    let launches: Vec<_> = launches.collect();
    let key = Key::of(first.kind(), &launches, problem, segments);
    queue_fastest(&TUNER, tilings, client, key, launches);
    Ok(())
}
