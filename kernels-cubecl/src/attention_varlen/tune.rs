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
struct Key {
    /// Engine, dtype, head_dims and options, as blueprints print them.
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

/// Cuts the work list for a number of query rows per tile.
pub type CutWork = Arc<dyn Fn(usize) -> DeviceWorkList + Send + Sync>;

#[derive(Clone)]
struct Inputs {
    client: Client,
    problem: AttentionProblem,
    blueprints: Arc<[AttentionBlueprint]>,
    cut: CutWork,
    segments: usize,
    tensors: AttentionTensors,
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
    static TUNER: LocalTuner<Key, String> = local_tuner!();
    let identity = &client.properties().identity;
    let device = format!("{} {}", identity.name, identity.fingerprint);
    let set = TUNER.init(&device, tunables);
    let inputs = Inputs {
        client: client.clone(),
        problem: *problem,
        blueprints: blueprints.into(),
        cut,
        segments,
        tensors,
    };
    TUNER.execute(&device, client, set, inputs);
    Ok(())
}

/// One for each tiling that there is: a blueprint has one of them.
fn tunables() -> TunableSet<Key, Inputs, ()> {
    let mut set = TunableSet::new(key, |_: &Key, inputs: &Inputs| inputs.clone());
    for tiling in tilings() {
        set = set.with(Tunable::new(&tiling.clone(), move |inputs: Inputs| {
            let Inputs { client, problem, blueprints, cut, tensors, .. } = inputs;
            let blueprint = blueprints.iter().find(|blueprint| blueprint.tiling() == tiling);
            let blueprint = blueprint.ok_or_else(|| "does not fit".to_owned())?;
            launch(&client, &problem, blueprint, &cut(blueprint.tile_q()), tensors)
                .map_err(|error| error.to_string())
        }));
    }
    set
}

fn key(inputs: &Inputs) -> Key {
    let Inputs { problem, blueprints, segments, .. } = inputs;
    Key::new(
        blueprints[0].kind(),
        problem.heads(),
        problem.heads() / problem.heads_kv(),
        problem.tokens_q(),
        problem.tokens_k(),
        problem.tokens_q().div_ceil((*segments).max(1)),
    )
}
