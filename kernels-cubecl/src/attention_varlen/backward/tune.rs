//! Measuring which tiles are the fastest.

use std::sync::Arc;

use cubecl::{
    client::Client,
    tune::{LocalTuner, local_tuner},
};

use super::{
    super::{
        CutWork,
        tune::{Key, Launch, Tuner, queue_fastest},
    },
    AttentionGradBlueprint, AttentionGradProblem, AttentionGradTensors, GradWork,
    launch::{check, launch_wanted},
    tiling::tilings,
};
use crate::LaunchError;

/// The gradients that are wanted, each with what cuts the work list of its pass: [`GradWork`] for any
/// tiles.
#[derive(Clone)]
pub enum CutGradWork {
    /// Those of queries, keys and values.
    All {
        /// Cuts the work list over queries.
        cut_q: CutWork,
        /// Cuts the work list over keys.
        cut_k: CutWork,
    },
    /// That of the queries.
    Queries {
        /// Cuts the work list over queries.
        cut_q: CutWork,
    },
    /// Those of keys and values.
    KeysValues {
        /// Cuts the work list over keys.
        cut_k: CutWork,
    },
}

impl CutGradWork {
    /// Runs on the work lists for a blueprint.
    fn with<R>(
        &self,
        blueprint: &AttentionGradBlueprint,
        run: impl FnOnce(GradWork<'_>) -> R,
    ) -> R {
        let (tile_q, tile_k) = (blueprint.tile_q(), blueprint.tile_k());
        match self {
            Self::All { cut_q, cut_k } => {
                run(GradWork::All { work_q: &cut_q(tile_q), work_k: &cut_k(tile_k) })
            }
            Self::Queries { cut_q } => run(GradWork::Queries { work_q: &cut_q(tile_q) }),
            Self::KeysValues { cut_k } => run(GradWork::KeysValues { work_k: &cut_k(tile_k) }),
        }
    }
}

/// Queues the fastest of the blueprints, as the forward pass's
/// [`launch_fastest`](super::super::launch_fastest) does: tiles are measured for all of what is wanted.
///
/// `blueprints` come from [`candidates`](super::candidates) for this client's device and this problem.
/// `work` makes the work lists of [`launch_wanted`] for a blueprint's
/// [`tile_q`](AttentionGradBlueprint::tile_q) and [`tile_k`](AttentionGradBlueprint::tile_k), of this many
/// `segments`.
///
/// # Errors
///
/// As [`launch_wanted`].
///
/// # Panics
///
/// As [`launch_wanted`], and if there is no blueprint.
pub fn launch_fastest(
    client: &Client,
    problem: &AttentionGradProblem,
    blueprints: &[AttentionGradBlueprint],
    segments: usize,
    work: CutGradWork,
    tensors: AttentionGradTensors,
) -> Result<(), LaunchError> {
    let first = blueprints.first().expect("blueprints: expected at least one, got none");
    let forward = &problem.forward;
    if blueprints.len() == 1 || forward.tokens_q() == 0 || forward.tokens_k() == 0 {
        return work.with(first, |work| launch_wanted(client, problem, first, work, tensors));
    }
    // What is wrong with the call is found here, not by each of the measurements.
    work.with(first, |work| check(problem, first, work, &tensors))?;
    static TUNER: Tuner = local_tuner!();
    let wanted = match &work {
        CutGradWork::All { .. } => "",
        CutGradWork::Queries { .. } => " d_q",
        CutGradWork::KeysValues { .. } => " d_k d_v",
    };
    let launches = blueprints.iter().map(|&blueprint| {
        let (client, problem) = (client.clone(), *problem);
        let (work, tensors) = (work.clone(), tensors.clone());
        let run = move || {
            let tensors = tensors.clone();
            work.with(&blueprint, |work| {
                launch_wanted(&client, &problem, &blueprint, work, tensors)
            })
        };
        (blueprint.tiling(), Arc::new(run) as Launch)
    });
    let launches: Vec<_> = launches.collect();
    let key = Key::of(first.kind() + wanted, &launches, forward, segments);
    queue_fastest(&TUNER, tilings, client, key, launches);
    Ok(())
}
