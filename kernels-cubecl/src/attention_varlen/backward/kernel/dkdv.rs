//! Gradients of keys and values.

use cubecl::{ir::ElemType, prelude::*};

use super::Target;
use crate::{
    attention_varlen::kernel::{Scalars, ScoreOptions, work_item},
    tile::{
        Axis, F2, GradientAlgebra, GradientShape,
        Product::{Scores, Weights},
    },
};

/// dk and dv: one cube per (key tile, key head).
///
/// Keys and values are the rows; the queries and d_out of every head that reads them stream past.
/// In the work list queries and keys are swapped: it lists key tiles, whose band says which queries see
/// a key; so are `left` and `right` of the scalars, whose heads are those of the keys.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn attention_varlen_dkdv<
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
    dk: Target,
    dv: Target,
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
    let head_kv = (cube / scalars.tiles) as usize;
    let heads_per_kv = scalars.heads_per_kv as usize;
    let heads = scalars.heads as usize * heads_per_kv;
    let item = work_item(work, cube % scalars.tiles, &scalars, options);
    let band = item.band;
    let rows = item.q_rows as u32;

    let mut memory = T::workspace(shape);
    let mut scores = T::scores(shape);
    let mut gradients = T::scores(shape);
    let mut d_keys = T::output(Scores, shape);
    let mut d_values = T::output(Weights, shape);
    let mut statistics = T::statistics(Axis::Columns, shape);

    let k_at = item.q_start * k.stride(0) + head_kv * k.stride(1);
    T::load_rows::<F, NK>(&mut memory, k, k_at, rows, Scores, shape);
    let v_at = item.q_start * v.stride(0) + head_kv * v.stride(1);
    T::load_rows::<F, NV>(&mut memory, v, v_at, rows, Weights, shape);

    let tile_q = comptime!(shape.grid.tile_columns() as i32);
    let end = band.end_key(item.q_rows);
    for group in 0..heads_per_kv {
        let head = head_kv * heads_per_kv + group;
        let mut query = band.first_key();
        while query < end {
            let queries = min(tile_q, band.k_len - query) as u32;
            let token = item.k_start + query as usize;
            let q_at = token * q.stride(0) + head * q.stride(1);
            let d_out_at = token * d_out.stride(0) + head * d_out.stride(1);

            T::load_columns::<F, ND>(&mut memory, d_out, d_out_at, queries, Weights, shape);
            if comptime!(!shape.one_room) {
                T::load_columns::<F, NQ>(&mut memory, q, q_at, queries, Scores, shape);
            }
            sync_cube();
            T::mma_ab_t(&mut memory, &mut gradients, Weights, shape);
            if comptime!(shape.one_room) {
                sync_cube();
                T::load_columns::<F, NQ>(&mut memory, q, q_at, queries, Scores, shape);
                sync_cube();
            }
            T::mma_ab_t(&mut memory, &mut scores, Scores, shape);
            // Not before the products, through which they would take two registers for every query.
            T::load_statistics(
                &mut statistics,
                stats,
                token * heads + head,
                heads,
                queries,
                Axis::Columns,
                shape,
            );
            T::differentiate(
                &mut scores,
                &mut gradients,
                &statistics,
                scalars.score_scale,
                scalars.softcap,
                options.softcap,
                Axis::Columns,
                shape,
            );
            if band.cuts(query, tile_q, item.q_rows) {
                T::mask(&mut scores, &mut gradients, &band, query, shape);
            }

            T::stage(&mut memory, &gradients, shape);
            T::mma_ab(&mut memory, &mut d_keys, Scores, shape);

            if comptime!(shape.one_room) {
                T::load_columns::<F, ND>(&mut memory, d_out, d_out_at, queries, Weights, shape);
            }
            T::stage(&mut memory, &scores, shape);
            T::mma_ab(&mut memory, &mut d_values, Weights, shape);

            query += tile_q;
        }
    }

    let target = dk.origin(item.q_start, head_kv);
    let stride = dk.token_stride;
    T::store::<F>(&mut memory, &d_keys, grads, target, stride, rows, softmax_scale, Scores, shape);
    let target = dv.origin(item.q_start, head_kv);
    let stride = dv.token_stride;
    T::store::<F>(&mut memory, &d_values, grads, target, stride, rows, 1.0f32, Weights, shape);
}
