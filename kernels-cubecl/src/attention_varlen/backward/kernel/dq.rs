//! Gradient of the queries.

use cubecl::{ir::ElemType, prelude::*};

use super::Target;
use crate::{
    attention_varlen::kernel::{Scalars, ScoreOptions, work_item},
    tile::{
        Axis, F2, GradientAlgebra, GradientShape,
        Product::{Scores, Weights},
    },
};

/// dq: one cube per (query tile, head); see [`GradientAlgebra`] for what the steps do.
///
/// Queries and d_out are the rows; keys and values stream past.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn attention_varlen_dq<
    T: GradientAlgebra,
    F: Float,
    NQ: Size,
    NK: Size,
    NV: Size,
    ND: Size,
>(
    q: &Tensor<Vector<F, NQ>>,
    k: &Tensor<Vector<F, NK>>,
    v: &Tensor<Vector<F, NV>>,
    d_out: &Tensor<Vector<F, ND>>,
    stats: &[F2],
    work: &[i32],
    grads: &mut [Vector<F, Const<4>>],
    dq: Target,
    scalars: Scalars,
    softmax_scale: f32,
    #[comptime] shape: GradientShape,
    #[comptime] options: ScoreOptions,
    #[define(F)] _dtype: ElemType,
    #[define(NQ)] _vector_q: usize,
    #[define(NK)] _vector_k: usize,
    #[define(NV)] _vector_v: usize,
    #[define(ND)] _vector_d_out: usize,
) {
    let cube = CUBE_POS as u32;
    if cube >= scalars.tiles * scalars.heads {
        terminate!();
    }
    let head = (cube / scalars.tiles) as usize;
    let head_kv = head / scalars.heads_per_kv as usize;
    let item = work_item(work, cube % scalars.tiles, &scalars, options);
    let band = item.band;
    let rows = item.q_rows as u32;

    let mut memory = T::workspace(shape);
    let mut scores = T::scores(shape);
    let mut gradients = T::scores(shape);
    let mut output = T::output(Scores, shape);
    let mut statistics = T::statistics(Axis::Rows, shape);

    let q_at = item.q_start * q.stride(0) + head * q.stride(1);
    T::load_rows::<F, NQ>(&mut memory, q, q_at, rows, Scores, shape);
    let d_out_at = item.q_start * d_out.stride(0) + head * d_out.stride(1);
    T::load_rows::<F, ND>(&mut memory, d_out, d_out_at, rows, Weights, shape);
    let heads = scalars.heads as usize;
    let stats_at = item.q_start * heads + head;
    T::load_statistics(&mut statistics, stats, stats_at, heads, rows, Axis::Rows, shape);

    let tile_k = comptime!(shape.grid.tile_columns() as i32);
    let end = band.end_key(item.q_rows);
    let mut key = band.first_key();
    while key < end {
        let keys = min(tile_k, band.k_len - key) as u32;
        let token = item.k_start + key as usize;
        let k_at = token * k.stride(0) + head_kv * k.stride(1);
        let v_at = token * v.stride(0) + head_kv * v.stride(1);

        T::load_columns::<F, NV>(&mut memory, v, v_at, keys, Weights, shape);
        if comptime!(!shape.one_room) {
            T::load_columns::<F, NK>(&mut memory, k, k_at, keys, Scores, shape);
        }
        sync_cube();
        T::mma_ab_t(&mut memory, &mut gradients, Weights, shape);
        if comptime!(shape.one_room) {
            sync_cube();
            T::load_columns::<F, NK>(&mut memory, k, k_at, keys, Scores, shape);
            sync_cube();
        }
        T::mma_ab_t(&mut memory, &mut scores, Scores, shape);
        T::differentiate(
            &mut scores,
            &mut gradients,
            &statistics,
            scalars.score_scale,
            scalars.softcap,
            options.softcap,
            Axis::Rows,
            shape,
        );
        if band.cuts(key, tile_k, item.q_rows) {
            T::mask(&mut scores, &mut gradients, &band, key, shape);
        }

        T::stage(&mut memory, &gradients, shape);
        T::mma_ab(&mut memory, &mut output, Scores, shape);

        key += tile_k;
    }

    let target = dq.origin(item.q_start, head);
    let stride = dq.token_stride;
    T::store::<F>(&mut memory, &output, grads, target, stride, rows, softmax_scale, Scores, shape);
}
