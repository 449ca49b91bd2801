//! The gradient of the fused norm and rotation.

use cubecl::{ir::ElemType, prelude::*};

use super::RopeQkNormBackwardBlueprint;
use crate::rope_qk_norm::kernel::{Tables, element_stride, table};

/// The part of a head that one unit works on: the vector pairs `(i, i + half)` for
/// `i = unit, unit + units_per_head, ...`.
#[derive(CubeType)]
struct Pairs<N: Size> {
    low: Array<Vector<f32, N>>,
    high: Array<Vector<f32, N>>,
}

#[cube]
impl<N: Size> Pairs<N> {
    fn zeros(#[comptime] blueprint: RopeQkNormBackwardBlueprint) -> Self {
        let pairs = comptime!(blueprint.pairs_per_unit());
        let mut low = Array::<Vector<f32, N>>::new(pairs);
        let mut high = Array::<Vector<f32, N>>::new(pairs);
        #[unroll]
        for i in 0..pairs {
            low[i] = Vector::new(0.0f32);
            high[i] = Vector::new(0.0f32);
        }
        Pairs::<N> { low, high }
    }
}

/// Number `i` of this unit's pairs; past the end of the head for the last units of some shapes.
#[cube]
fn pair(#[comptime] i: usize, #[comptime] blueprint: RopeQkNormBackwardBlueprint) -> usize {
    UNIT_POS as usize % blueprint.units_per_head + comptime!(i * blueprint.units_per_head)
}

/// The heads that a cube works through: blocks of `heads_per_cube` rows of one group, where a row is
/// a head of a token, counted in 32 bits: divisions of 64 take a hundred instructions.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Share {
    group: u32,
    heads: u32,
    rows: u32,
    first_block: u32,
    step: u32,
}

/// Cubes `0 .. cubes_q` share the rows of group 0 and the others those of group 1, in turns.
#[cube]
fn share(
    tokens: usize,
    heads: u32,
    heads_kv: u32,
    cubes_q: u32,
    cubes: u32,
    #[comptime] blueprint: RopeQkNormBackwardBlueprint,
) -> Share {
    let cube = CUBE_POS as u32;
    if comptime!(blueprint.groups == 1) {
        Share {
            group: 0u32.runtime(),
            heads,
            rows: tokens as u32 * heads,
            first_block: cube,
            step: cubes,
        }
    } else {
        let keys = cube >= cubes_q;
        let heads = select(keys, heads_kv, heads);
        Share {
            group: select(keys, 1u32, 0u32),
            heads,
            rows: tokens as u32 * heads,
            first_block: select(keys, cube - cubes_q, cube),
            step: select(keys, cubes - cubes_q, cubes_q),
        }
    }
}

/// A head of a token.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Head {
    token: usize,
    group: usize,
    head: usize,
    /// False past the last row.
    exists: bool,
}

/// The head of this unit in a block of rows.
#[cube]
fn head(share: &Share, block: u32, #[comptime] blueprint: RopeQkNormBackwardBlueprint) -> Head {
    let (per_cube, units) =
        comptime!((blueprint.heads_per_cube as u32, blueprint.units_per_head as u32));
    let row = block * per_cube + UNIT_POS / units;
    Head {
        token: (row / share.heads) as usize,
        group: share.group as usize,
        head: (row % share.heads) as usize,
        exists: row < share.rows,
    }
}

/// Offset of element 0 of a head.
#[cube]
fn origin<F: Float, N: Size>(tensor: &Tensor<Vector<F, N>>, head: &Head) -> usize {
    head.token * tensor.stride(0) + head.group * tensor.stride(1) + head.head * tensor.stride(2)
}

/// Norm and perhaps rotation. Replaces or writes `dx`, and leaves each cube's part of the weight
/// gradients in its row of `partials`.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn norm_backward<F: Float, W: Float, N: Size>(
    x: &Tensor<Vector<F, N>>,
    weight_q: &[Vector<W, N>],
    weight_k: ComptimeOption<Box<[Vector<W, N>]>>,
    tables: ComptimeOption<Tables<N>>,
    d_out: ComptimeOption<OwnedTensor<Vector<F, N>>>,
    dx: &mut Tensor<Vector<F, N>>,
    partials: &mut [Vector<f32, N>],
    heads: u32,
    heads_kv: u32,
    cubes_q: u32,
    cubes: u32,
    epsilon: f32,
    #[comptime] blueprint: RopeQkNormBackwardBlueprint,
    #[define(F)] _dtype: ElemType,
    #[define(W)] _weight_dtype: ElemType,
    #[define(N)] _vector: usize,
) {
    if CUBE_POS as u32 >= cubes {
        terminate!();
    }
    let share = share(dx.shape(0), heads, heads_kv, cubes_q, cubes, blueprint);
    let mut weight = Pairs::<N>::zeros(blueprint);
    load_weight::<W, N>(&mut weight, weight_q, blueprint);
    #[comptime]
    match &weight_k {
        ComptimeOption::Some(weight_k) => {
            if share.group == 1 {
                load_weight::<W, N>(&mut weight, weight_k, blueprint);
            }
        }
        ComptimeOption::None => {}
    }
    let mut d_weight = Pairs::<N>::zeros(blueprint);
    let mut sums = Shared::<[f32]>::new_slice(comptime!(2 * blueprint.units()));

    let blocks = share.rows.div_ceil(comptime!(blueprint.heads_per_cube as u32));
    for block in range_stepped(share.first_block, blocks, share.step) {
        let head = head(&share, block, blueprint);
        let mut normed = load::<F, N>(x, &head, blueprint);
        let gradient = gradient::<F, N>(&d_out, &*dx, &tables, &head, blueprint);
        let (squares, products) = row_sums(&mut sums, &normed, &gradient, &weight, blueprint);
        let dim = comptime!(blueprint.head_dim as f32);
        let factor = (squares / dim + epsilon).inverse_sqrt();
        let mean = factor * products / dim;
        if head.exists {
            #[unroll]
            for i in 0..comptime!(blueprint.pairs_per_unit()) {
                let scale = Vector::new(factor);
                normed.low[i] *= scale;
                normed.high[i] *= scale;
                d_weight.low[i] += gradient.low[i] * normed.low[i];
                d_weight.high[i] += gradient.high[i] * normed.high[i];
                let mean = Vector::new(mean);
                normed.low[i] = scale * (gradient.low[i] * weight.low[i] - normed.low[i] * mean);
                normed.high[i] =
                    scale * (gradient.high[i] * weight.high[i] - normed.high[i] * mean);
            }
            store::<F, N>(&normed, dx, &head, blueprint);
        }
        // The next block's sums take the place of these.
        sync_cube();
    }
    store_partial(&d_weight, partials, blueprint);
}

/// Rotation alone.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn rotation_backward<F: Float, N: Size>(
    tables: ComptimeOption<Tables<N>>,
    d_out: ComptimeOption<OwnedTensor<Vector<F, N>>>,
    dx: &mut Tensor<Vector<F, N>>,
    heads: u32,
    heads_kv: u32,
    cubes_q: u32,
    cubes: u32,
    #[comptime] blueprint: RopeQkNormBackwardBlueprint,
    #[define(F)] _dtype: ElemType,
    #[define(N)] _vector: usize,
) {
    if CUBE_POS as u32 >= cubes {
        terminate!();
    }
    let share = share(dx.shape(0), heads, heads_kv, cubes_q, cubes, blueprint);
    let head = head(&share, share.first_block, blueprint);
    if head.exists {
        let gradient = gradient::<F, N>(&d_out, &*dx, &tables, &head, blueprint);
        store::<F, N>(&gradient, dx, &head, blueprint);
    }
}

/// The gradient of the output with the rotation undone. Of heads that do not exist: zeros.
#[cube]
fn gradient<F: Float, N: Size>(
    d_out: &ComptimeOption<OwnedTensor<Vector<F, N>>>,
    dx: &Tensor<Vector<F, N>>,
    tables: &ComptimeOption<Tables<N>>,
    head: &Head,
    #[comptime] blueprint: RopeQkNormBackwardBlueprint,
) -> Pairs<N> {
    #[comptime]
    let mut gradient = match d_out {
        ComptimeOption::Some(d_out) => load::<F, N>(d_out, head, blueprint),
        ComptimeOption::None => load::<F, N>(dx, head, blueprint),
    };
    #[comptime]
    match tables {
        ComptimeOption::Some(tables) =>
        {
            #[unroll]
            for i in 0..comptime!(blueprint.pairs_per_unit()) {
                let pair = pair(i, blueprint);
                if head.exists && pair < comptime!(blueprint.half()) {
                    let cos = table(&tables.cos, head.token, pair);
                    let sin = table(&tables.sin, head.token, pair);
                    let (low, high) = (gradient.low[i], gradient.high[i]);
                    gradient.low[i] = low * cos + high * sin;
                    gradient.high[i] = high * cos - low * sin;
                }
            }
        }
        ComptimeOption::None => {}
    }
    gradient
}

/// Reads this unit's part of a head; zeros past the end and of heads that do not exist.
#[cube]
fn load<F: Float, N: Size>(
    tensor: &Tensor<Vector<F, N>>,
    head: &Head,
    #[comptime] blueprint: RopeQkNormBackwardBlueprint,
) -> Pairs<N> {
    let half = comptime!(blueprint.half());
    let start = origin::<F, N>(tensor, head);
    let stride = element_stride::<F, N>(tensor, 3usize);
    let mut pairs = Pairs::<N>::zeros(blueprint);
    #[unroll]
    for i in 0..comptime!(blueprint.pairs_per_unit()) {
        let pair = pair(i, blueprint);
        if head.exists && pair < half {
            let vector_size = N::value();
            let at = (start + pair * vector_size * stride) / vector_size;
            pairs.low[i] = Vector::cast_from(tensor[at]);
            pairs.high[i] = Vector::cast_from(tensor[at + half * stride]);
        }
    }
    pairs
}

/// Writes this unit's part of a head that exists.
#[cube]
fn store<F: Float, N: Size>(
    pairs: &Pairs<N>,
    tensor: &mut Tensor<Vector<F, N>>,
    head: &Head,
    #[comptime] blueprint: RopeQkNormBackwardBlueprint,
) {
    let half = comptime!(blueprint.half());
    let start = origin::<F, N>(&*tensor, head);
    let stride = element_stride::<F, N>(&*tensor, 3usize);
    #[unroll]
    for i in 0..comptime!(blueprint.pairs_per_unit()) {
        let pair = pair(i, blueprint);
        if pair < half {
            let vector_size = N::value();
            let at = (start + pair * vector_size * stride) / vector_size;
            tensor[at] = Vector::cast_from(pairs.low[i]);
            tensor[at + half * stride] = Vector::cast_from(pairs.high[i]);
        }
    }
}

/// This unit's part of a weight; past the end its last vector, which meets zeros.
#[cube]
fn load_weight<W: Float, N: Size>(
    pairs: &mut Pairs<N>,
    weight: &[Vector<W, N>],
    #[comptime] blueprint: RopeQkNormBackwardBlueprint,
) {
    let half = comptime!(blueprint.half());
    #[unroll]
    for i in 0..comptime!(blueprint.pairs_per_unit()) {
        let pair = min(pair(i, blueprint), comptime!(half - 1));
        pairs.low[i] = Vector::cast_from(weight[pair]);
        pairs.high[i] = Vector::cast_from(weight[pair + half]);
    }
}

/// Sums of `x x` and of `gradient weight x` over the head that this unit works on. Every unit of a
/// head adds the same numbers in the same order. Synchronises the cube once.
#[cube]
fn row_sums<N: Size>(
    sums: &mut Shared<[f32]>,
    x: &Pairs<N>,
    gradient: &Pairs<N>,
    weight: &Pairs<N>,
    #[comptime] blueprint: RopeQkNormBackwardBlueprint,
) -> (f32, f32) {
    let units = comptime!(blueprint.units());
    let mut squares = Vector::<f32, N>::new(0.0f32);
    let mut products = Vector::<f32, N>::new(0.0f32);
    #[unroll]
    for i in 0..comptime!(blueprint.pairs_per_unit()) {
        let (low, high) = (x.low[i], x.high[i]);
        squares += low * low + high * high;
        products +=
            gradient.low[i] * weight.low[i] * low + gradient.high[i] * weight.high[i] * high;
    }
    sums[UNIT_POS as usize] = total(squares);
    sums[UNIT_POS as usize + units] = total(products);
    sync_cube();
    let first = UNIT_POS as usize / blueprint.units_per_head * blueprint.units_per_head;
    let mut squares = f32::new(0.0f32);
    let mut products = f32::new(0.0f32);
    #[unroll]
    for i in 0..blueprint.units_per_head {
        squares += sums[first + i];
        products += sums[first + comptime!(i + units)];
    }
    (squares, products)
}

#[cube]
fn total<N: Size>(vector: Vector<f32, N>) -> f32 {
    let mut total = f32::new(0.0f32);
    #[unroll]
    for e in 0..N::value() {
        total += vector.extract(e);
    }
    total
}

/// Sums over the heads that the cube works on at a time, and writes the cube's row.
#[cube]
fn store_partial<N: Size>(
    d_weight: &Pairs<N>,
    partials: &mut [Vector<f32, N>],
    #[comptime] blueprint: RopeQkNormBackwardBlueprint,
) {
    let half = comptime!(blueprint.half());
    let (units, per_head) = comptime!((blueprint.units(), blueprint.units_per_head));
    let mut room = Shared::<[Vector<f32, N>]>::new_slice(comptime!(2 * units));
    let unit = UNIT_POS as usize;
    #[unroll]
    for i in 0..comptime!(blueprint.pairs_per_unit()) {
        room[unit] = d_weight.low[i];
        room[unit + units] = d_weight.high[i];
        sync_cube();
        let pair = pair(i, blueprint);
        if unit < per_head && pair < half {
            let mut low = Vector::<f32, N>::new(0.0f32);
            let mut high = Vector::<f32, N>::new(0.0f32);
            for head in 0..blueprint.heads_per_cube {
                low += room[head * per_head + unit];
                high += room[head * per_head + unit + units];
            }
            let target = CUBE_POS * comptime!(2 * half) + pair;
            partials[target] = low;
            partials[target + half] = high;
        }
        sync_cube();
    }
}
