//! Packed attention and its gradients.

use cubecl::ir::DeviceProperties;
use kernels_cubecl::attention_varlen::{self, backward};
use kernels_cubecl::{
    AttentionBlueprint, AttentionGradBlueprint, AttentionGradProblem, AttentionProblem, Engine,
    GradPass, TensorLayout, Unsupported,
};

use super::{Selection, Variant};

/// Every kernel that may be the fastest for an attention call, and the plain one, which serves the
/// dtypes and devices that the others do not.
pub(super) fn forward(
    properties: &DeviceProperties,
    selection: Selection,
) -> Result<Vec<Variant>, Unsupported> {
    let mut variants = Vec::new();
    for (problem, _) in problems(selection) {
        let plain = attention_varlen::supports_engine(properties, &problem, Engine::Simt)?;
        let candidates = attention_varlen::candidates(properties, &problem)?;
        variants.extend(candidates.into_iter().chain([plain]).map(variant));
    }
    Ok(variants)
}

/// Every kernel with a producer, on a device that can have one, for the problems that it serves.
pub(super) fn asynchronous(
    properties: &DeviceProperties,
    selection: Selection,
) -> Result<Vec<Variant>, Unsupported> {
    let mut variants = Vec::new();
    for (problem, _) in problems(selection) {
        match attention_varlen::candidates_on(properties, &problem, Engine::AsyncMma) {
            Ok(candidates) => variants.extend(candidates.into_iter().map(variant)),
            Err(Unsupported::Engine { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(variants)
}

/// The kernel of a blueprint.
fn variant(blueprint: AttentionBlueprint) -> Variant {
    Variant {
        operation: "attention_varlen",
        blueprint: blueprint.to_string(),
        threads: blueprint.units(),
        needs_cpp: blueprint.engine() == Engine::AsyncMma,
        build: Box::new(move |properties, target| {
            attention_varlen::kernel(blueprint, properties, target)
        }),
    }
}

/// The passes that compute gradients. The first differs by neither mask nor softcap, the others do
/// not differ by whether lse has a gradient.
pub(super) fn backward(
    properties: &DeviceProperties,
    selection: Selection,
) -> Result<Vec<Variant>, Unsupported> {
    let variant = |blueprint: AttentionGradBlueprint, pass: GradPass| Variant {
        operation: match pass {
            GradPass::Statistics => "attention_varlen statistics",
            GradPass::Queries => "attention_varlen dq",
            GradPass::KeysValues => "attention_varlen dk dv",
        },
        blueprint: format!("{blueprint} {pass}"),
        threads: blueprint.units(pass),
        needs_cpp: false,
        build: Box::new(move |properties, target| {
            backward::kernel(blueprint, pass, properties, target)
        }),
    };
    let mut variants = Vec::new();
    for (forward, d_out) in problems(selection) {
        let problem = AttentionGradProblem { d_out, ..AttentionGradProblem::new(forward) };
        let plain = backward::supports_engine(properties, &problem, Engine::Simt)?;
        for blueprint in backward::candidates(properties, &problem)?.into_iter().chain([plain]) {
            let passes = [GradPass::Queries, GradPass::KeysValues];
            variants.extend(passes.map(|pass| variant(blueprint, pass)));
        }
        if forward.window == (None, None) && forward.softcap.is_none() {
            for d_lse in [None, Some([forward.q.shape[1], 1])] {
                let problem = AttentionGradProblem { d_lse, ..problem };
                let blueprint = backward::supports_engine(properties, &problem, Engine::Simt)?;
                variants.push(variant(blueprint, GradPass::Statistics));
            }
        }
    }
    Ok(variants)
}

/// Attention calls, each with a layout of the gradient of its output.
fn problems(selection: Selection) -> impl Iterator<Item = (AttentionProblem, TensorLayout)> {
    selection.inputs().flat_map(move |(dtype, (head_dim, value_dim), layout)| {
        let [q, k] = [0, 1].map(|index| layout.tensor(index, head_dim));
        let [v, d_out] = [2, 3].map(|index| layout.tensor(index, value_dim));
        let plain = AttentionProblem::new(q, k, v, dtype);
        options(selection).map(move |(left, right, softcap)| {
            (AttentionProblem { window: (left, right), softcap, ..plain }, d_out)
        })
    })
}

type Options = (Option<usize>, Option<usize>, Option<f32>);

/// Both sides of the window, and the cap.
fn options(selection: Selection) -> impl Iterator<Item = Options> {
    let [sides, caps] = [[None, Some(1)], [None, Some(1)]];
    let all = sides.into_iter().flat_map(move |left| {
        sides.into_iter().flat_map(move |right| caps.map(|cap| (left, right, cap.map(|_| 30.0))))
    });
    all.filter(move |(left, right, softcap)| {
        let set = [left.is_some(), right.is_some(), softcap.is_some()];
        selection == Selection::Full || set == [set[0]; 3]
    })
}
