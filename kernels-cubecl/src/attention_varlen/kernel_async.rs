//! The attention loop with a producer.

use cubecl::{ir::ElemType, prelude::*};

use super::{
    AttentionBlueprint,
    kernel::{Scalars, work_item},
};
use crate::tile::{
    MASKED, RingAlgebra,
    Streamed::{Keys, Values},
    TileShape,
};

/// As [`attention_varlen`](super::kernel::attention_varlen), with keys and values that come through
/// rings: there is no barrier of the whole cube in the loop, and a plane that has its tile goes on.
///
/// Keys are filled one turn ahead of their use and values a product less: each tile is asked for as
/// soon as all planes have left its stage, at a place where they are likely to have.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn attention_varlen_async<T: RingAlgebra, F: Float, NQ: Size, NK: Size, NV: Size>(
    q: &Tensor<Vector<F, NQ>>,
    k: &T::Source<F, NK>,
    v: &T::Source<F, NV>,
    work: &[i32],
    out: &mut [Vector<F, Const<4>>],
    lse: &mut [f32],
    scalars: Scalars,
    query_factor: f32,
    minus_infinity: f32,
    #[comptime] blueprint: AttentionBlueprint,
    #[define(F)] _dtype: ElemType,
    #[define(NQ)] _vector_q: usize,
    #[define(NK)] _vector_k: usize,
    #[define(NV)] _vector_v: usize,
) {
    let shape = comptime!(blueprint.shape);
    let cube = CUBE_POS as u32;
    if cube >= scalars.tiles * scalars.heads {
        terminate!();
    }
    let head = (cube / scalars.tiles) as usize;
    let head_kv = head / scalars.heads_per_kv as usize;
    let item = work_item(work, cube % scalars.tiles, &scalars, blueprint.options);
    let band = item.band;
    let q_rows = item.q_rows;
    let scale = scalars.weight_scale(blueprint.options);

    let mut workspace = T::workspace(shape);
    let mut rings = T::rings(shape);
    let mut scores = T::scores(shape);
    let mut output = T::output(shape);
    let mut maximum = T::rows(f32::new(MASKED), shape);
    let mut sum = T::rows(f32::new(0.0f32), shape);
    let mut correction = T::rows(f32::new(0.0f32), shape);

    let tile_k = comptime!(shape.k_rows as i32);
    let stages = comptime!(stages(shape) as u32);
    let end = band.end_key(q_rows);
    let mut key = band.first_key();
    let first = item.k_start + key as usize;
    let count = max(0i32, end - key + (tile_k - 1)) as u32 / comptime!(tile_k as u32);
    #[unroll]
    for tile in 0..stages {
        let token = first + comptime!(tile as usize * shape.k_rows);
        if tile < count {
            T::fill::<F, NK>(&mut workspace, &mut rings, k, tile, token, head_kv, Keys, shape);
            if comptime!(tile + 1 < stages) {
                T::fill::<F, NV>(
                    &mut workspace,
                    &mut rings,
                    v,
                    tile,
                    token,
                    head_kv,
                    Values,
                    shape,
                );
            }
        }
    }
    let q_origin = item.q_start * q.stride(0) + head * q.stride(1);
    T::load_query::<F, NQ>(&mut workspace, q, q_origin, q_rows as u32, query_factor, shape);

    let mut tile = 0u32.runtime();
    while tile < count {
        let keys = band.keys_from(key, tile_k);
        let token = first + tile as usize * comptime!(shape.k_rows);

        T::wait(&mut workspace, &mut rings, tile, Keys, shape);
        T::mma_ab_t(&mut workspace, &mut scores, shape);
        T::release(&mut rings, tile, Keys, shape);
        let next = tile + comptime!(stages - 1);
        if next < count {
            let token = token + comptime!((stages as usize - 1) * shape.k_rows);
            T::fill::<F, NV>(&mut workspace, &mut rings, v, next, token, head_kv, Values, shape);
        }
        if comptime!(blueprint.options.softcap) {
            T::softcap(&mut scores, scalars.score_scale, scalars.softcap, shape);
        }
        if band.cuts(key, tile_k, q_rows) {
            T::mask(&mut scores, &band, key, shape);
        }
        T::row_max(&mut workspace, &scores, &mut maximum, &mut correction, scale, shape);
        T::exp2(&mut scores, &maximum, scale, shape);
        T::row_sum(&scores, &mut sum, &correction, shape);
        T::rescale(&mut output, &correction, shape);

        let next = tile + stages;
        if next < count {
            let token = token + comptime!(stages as usize * shape.k_rows);
            T::fill::<F, NK>(&mut workspace, &mut rings, k, next, token, head_kv, Keys, shape);
        }
        T::stage_weights(&mut workspace, &scores, shape);
        T::wait(&mut workspace, &mut rings, tile, Values, shape);
        if keys < comptime!(shape.k_rows as u32) {
            T::clear_value(&mut workspace, keys, shape);
        }
        T::mma_ab(&mut workspace, &mut output, shape);
        T::release(&mut rings, tile, Values, shape);
        key += tile_k;
        tile += 1u32;
    }

    T::store::<F>(
        &mut workspace,
        &output,
        &maximum,
        &sum,
        scale,
        out,
        lse,
        item.q_start * scalars.heads as usize + head,
        scalars.heads as usize,
        q_rows as u32,
        minus_infinity,
        shape,
    );
}

/// Stages of the rings.
fn stages(shape: TileShape) -> usize {
    let ring = shape.matrix.and_then(|matrix| matrix.ring);
    ring.expect("an asynchronous loop has rings").stages
}
