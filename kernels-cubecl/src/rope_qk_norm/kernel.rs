//! The fused norm and rotation.

use cubecl::{ir::ElemType, prelude::*};

use super::RopeQkNormBlueprint;

/// cos and sin, `[tokens, head_dim / 2]`.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Tables<N: Size> {
    pub cos: OwnedTensor<Vector<f32, N>>,
    pub sin: OwnedTensor<Vector<f32, N>>,
}

/// Queries and keys in one launch: the first `query_cubes` cubes work on queries.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn rope_qk_norm<F: Float, W: Float, R: Float, N: Size>(
    q: &Tensor<Vector<F, N>>,
    k: &Tensor<Vector<F, N>>,
    weight_q: ComptimeOption<Box<[Vector<W, N>]>>,
    weight_k: ComptimeOption<Box<[Vector<W, N>]>>,
    tables: ComptimeOption<Tables<N>>,
    q_out: &mut [Vector<F, N>],
    k_out: &mut [Vector<F, N>],
    query_cubes: u32,
    epsilon: f32,
    #[comptime] blueprint: RopeQkNormBlueprint,
    #[define(F)] _dtype: ElemType,
    #[define(W)] _weight_dtype: ElemType,
    #[define(R)] _rounded_dtype: ElemType,
    #[define(N)] _vector: usize,
) {
    let cube = CUBE_POS as u32;
    if cube < query_cubes {
        heads::<F, W, R, N>(q, &weight_q, &tables, q_out, cube, epsilon, blueprint);
    } else {
        let cube = cube - query_cubes;
        heads::<F, W, R, N>(k, &weight_k, &tables, k_out, cube, epsilon, blueprint);
    }
}

/// Queries or keys alone, for devices that bind too few buffers for both.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn rope_norm<F: Float, W: Float, R: Float, N: Size>(
    x: &Tensor<Vector<F, N>>,
    weight: ComptimeOption<Box<[Vector<W, N>]>>,
    tables: ComptimeOption<Tables<N>>,
    out: &mut [Vector<F, N>],
    epsilon: f32,
    #[comptime] blueprint: RopeQkNormBlueprint,
    #[define(F)] _dtype: ElemType,
    #[define(W)] _weight_dtype: ElemType,
    #[define(R)] _rounded_dtype: ElemType,
    #[define(N)] _vector: usize,
) {
    let cube = CUBE_POS as u32;
    heads::<F, W, R, N>(x, &weight, &tables, out, cube, epsilon, blueprint);
}

/// The heads of one cube. Each head has `units_per_head` units, each unit the vector pairs
/// `(i, i + half)` for `i = unit, unit + units_per_head, ...`.
#[cube]
fn heads<F: Float, W: Float, R: Float, N: Size>(
    x: &Tensor<Vector<F, N>>,
    weight: &ComptimeOption<Box<[Vector<W, N>]>>,
    tables: &ComptimeOption<Tables<N>>,
    out: &mut [Vector<F, N>],
    cube: u32,
    epsilon: f32,
    #[comptime] blueprint: RopeQkNormBlueprint,
) {
    let half = comptime!(blueprint.half());
    let pairs = comptime!(blueprint.pairs_per_unit());
    let units = comptime!(blueprint.units_per_head);
    let unit = UNIT_POS as usize % units;
    // Rows are counted in 32 bits: divisions of 64 take a hundred instructions.
    let heads = x.shape(1) as u32;
    let row =
        cube * comptime!(blueprint.heads_per_cube as u32) + UNIT_POS / comptime!(units as u32);
    let token = (row / heads) as usize;
    let in_range = token < x.shape(0);

    let start = token * x.stride(0) + (row % heads) as usize * x.stride(1);
    let stride = element_stride::<F, N>(x, 2usize);
    let mut low = Array::<Vector<f32, N>>::new(pairs);
    let mut high = Array::<Vector<f32, N>>::new(pairs);
    #[unroll]
    for i in 0..pairs {
        let pair = unit + comptime!(i * units);
        low[i] = Vector::new(0.0f32);
        high[i] = Vector::new(0.0f32);
        if in_range && pair < half {
            let vector_size = N::value();
            let at = (start + pair * vector_size * stride) / vector_size;
            low[i] = Vector::cast_from(x[at]);
            high[i] = Vector::cast_from(x[at + half * stride]);
        }
    }

    #[comptime]
    match weight {
        ComptimeOption::Some(weight) => {
            let sum = sum_of_squares(&low, &high, pairs, blueprint);
            let mean = sum / comptime!(blueprint.head_dim as f32);
            let factor = Vector::new((mean + epsilon).inverse_sqrt());
            #[unroll]
            for i in 0..pairs {
                let pair = min(unit + comptime!(i * units), comptime!(half - 1));
                low[i] = weigh::<F, W, R, N>(low[i] * factor, weight[pair]);
                high[i] = weigh::<F, W, R, N>(high[i] * factor, weight[pair + half]);
            }
        }
        ComptimeOption::None => {}
    }

    if in_range {
        rotate_and_store::<F, N>(&low, &high, tables, out, row as usize, token, blueprint);
    }
}

/// Elements between neighbours in a head, on the last axis. Vectors are only read where that is 1,
/// and a stride that the compiler knows takes neither registers nor multiplications.
#[cube]
pub(super) fn element_stride<F: Float, N: Size>(
    tensor: &Tensor<Vector<F, N>>,
    #[comptime] axis: usize,
) -> usize {
    let vector_size = N::value();
    if comptime!(vector_size > 1) { 1usize.runtime() } else { tensor.stride(axis) }
}

/// Writes the head of this unit, rotated if there are tables.
#[cube]
fn rotate_and_store<F: Float, N: Size>(
    low: &Array<Vector<f32, N>>,
    high: &Array<Vector<f32, N>>,
    tables: &ComptimeOption<Tables<N>>,
    out: &mut [Vector<F, N>],
    row: usize,
    token: usize,
    #[comptime] blueprint: RopeQkNormBlueprint,
) {
    let half = comptime!(blueprint.half());
    let units = comptime!(blueprint.units_per_head);
    let unit = UNIT_POS as usize % units;
    #[unroll]
    for i in 0..comptime!(blueprint.pairs_per_unit()) {
        let pair = unit + comptime!(i * units);
        if pair < half {
            let target = row * comptime!(2 * half) + pair;
            #[comptime]
            match tables {
                ComptimeOption::Some(tables) => {
                    let cos = table(&tables.cos, token, pair);
                    let sin = table(&tables.sin, token, pair);
                    out[target] = Vector::cast_from(low[i] * cos - high[i] * sin);
                    out[target + half] = Vector::cast_from(high[i] * cos + low[i] * sin);
                }
                ComptimeOption::None => {
                    out[target] = Vector::cast_from(low[i]);
                    out[target + half] = Vector::cast_from(high[i]);
                }
            }
        }
    }
}

/// The normalised value rounded to the input type, times the weight, rounded to `R`.
#[cube]
fn weigh<F: Float, W: Float, R: Float, N: Size>(
    x: Vector<f32, N>,
    weight: Vector<W, N>,
) -> Vector<f32, N> {
    let rounded = Vector::<f32, N>::cast_from(Vector::<F, N>::cast_from(x));
    let weighted = rounded * Vector::<f32, N>::cast_from(weight);
    Vector::<f32, N>::cast_from(Vector::<R, N>::cast_from(weighted))
}

/// Vector `pair` of a table's row.
#[cube]
pub(super) fn table<N: Size>(
    table: &OwnedTensor<Vector<f32, N>>,
    token: usize,
    pair: usize,
) -> Vector<f32, N> {
    let vector_size = N::value();
    let row = token * table.stride(0);
    if comptime!(vector_size > 1) {
        table[row / vector_size + pair]
    } else {
        table[row + pair * table.stride(1)]
    }
}

/// Sum over the head that this unit works on. Every unit of a head adds the same numbers in the
/// same order.
#[cube]
fn sum_of_squares<N: Size>(
    low: &Array<Vector<f32, N>>,
    high: &Array<Vector<f32, N>>,
    #[comptime] pairs: usize,
    #[comptime] blueprint: RopeQkNormBlueprint,
) -> f32 {
    let mut squares = Vector::<f32, N>::new(0.0f32);
    #[unroll]
    for i in 0..pairs {
        squares += low[i] * low[i] + high[i] * high[i];
    }
    let mut own = f32::new(0.0f32);
    #[unroll]
    for e in 0..N::value() {
        own += squares.extract(e);
    }
    let mut partial = Shared::<[f32]>::new_slice(comptime!(blueprint.units()));
    partial[UNIT_POS as usize] = own;
    sync_cube();
    let first = UNIT_POS as usize / blueprint.units_per_head * blueprint.units_per_head;
    let mut sum = f32::new(0.0f32);
    #[unroll]
    for i in 0..blueprint.units_per_head {
        sum += partial[first + i];
    }
    sum
}
