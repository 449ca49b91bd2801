//! The three passes.

use cubecl::{ir::ElemType, prelude::*};

use super::{
    super::kernel::{ScoreOptions, work_item},
    AttentionGradBlueprint,
};
use crate::tile::{Axis, F2, GradientAlgebra, GradientShape, MASKED, Product, dot, read_vector};

/// Where a gradient goes, in elements.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone))]
pub(super) struct Target {
    pub offset: usize,
    pub token_stride: usize,
    pub head_stride: usize,
}

#[cube]
impl Target {
    fn origin(&self, token: usize, head: usize) -> usize {
        self.offset + token * self.token_stride + head * self.head_stride
    }
}

/// Writes lse and delta of every query. Each query has `lanes` units.
///
/// Queries that see no key have lse minus infinity; they get zeros. All their scores are masked, so
/// that no weight comes of it, and what is not finite stays out of the other passes.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn attention_varlen_statistics<F: Float, NO: Size, ND: Size>(
    out: &Tensor<Vector<F, NO>>,
    d_out: &Tensor<Vector<F, ND>>,
    lse: &[f32],
    d_lse: &ComptimeOption<OwnedTensor<f32>>,
    stats: &mut [F2],
    #[comptime] blueprint: AttentionGradBlueprint,
    #[define(F)] _dtype: ElemType,
    #[define(NO)] _vector_out: usize,
    #[define(ND)] _vector_d_out: usize,
) {
    let (lanes, rows) = comptime!(blueprint.statistics);
    let heads = out.shape(1);
    let lane = UNIT_POS as usize % lanes;
    let row = CUBE_POS * rows + UNIT_POS as usize / lanes;
    let (token, head) = (row / heads, row % heads);
    let in_range = token < out.shape(0);

    let mut own = f32::new(0.0f32);
    if in_range {
        let out_at = token * out.stride(0) + head * out.stride(1);
        let d_out_at = token * d_out.stride(0) + head * d_out.stride(1);
        for i in range_stepped(lane, comptime!(blueprint.shape.value_dim / 4), lanes) {
            let stride = out.stride(2);
            let a = read_vector::<F, NO>(out, out_at + i * 4 * stride, stride);
            let stride = d_out.stride(2);
            let b = read_vector::<F, ND>(d_out, d_out_at + i * 4 * stride, stride);
            own = dot(a, b, own);
        }
    }
    let sum = sum_of_lanes(own, lanes, comptime!(lanes * rows));

    if in_range && lane == 0 {
        let lse = lse[row];
        let unseen = lse < f32::new(MASKED);
        let mut delta = sum;
        #[comptime]
        match d_lse {
            ComptimeOption::Some(d_lse) => {
                delta -= d_lse[token * d_lse.stride(0) + head * d_lse.stride(1)];
            }
            ComptimeOption::None => {}
        }
        let mut value = F2::new(0.0f32);
        value.insert(0usize, select(unseen, f32::new(0.0f32), lse));
        value.insert(1usize, select(unseen, f32::new(0.0f32), delta));
        stats[row] = value;
    }
}

/// Sum over the `lanes` neighbouring units, always in the same order.
#[cube]
fn sum_of_lanes(own: f32, #[comptime] lanes: usize, #[comptime] units: usize) -> f32 {
    if comptime!(lanes == 1) {
        own
    } else {
        let mut partial = Shared::<[f32]>::new_slice(units);
        partial[UNIT_POS as usize] = own;
        sync_cube();
        let first = UNIT_POS as usize / lanes * lanes;
        let mut sum = f32::new(0.0f32);
        #[unroll]
        for i in 0..lanes {
            sum += partial[first + i];
        }
        sum
    }
}

/// dq: one cube per (query tile, head); see [`GradientAlgebra`] for what the steps do.
///
/// Queries, scaled by `query_scale`, and d_out are the rows; keys and values stream past.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn attention_varlen_dq<
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
    tiles: u32,
    heads: u32,
    heads_per_kv: u32,
    query_scale: f32,
    softmax_scale: f32,
    softcap: f32,
    left: i32,
    right: i32,
    #[comptime] shape: GradientShape,
    #[comptime] options: ScoreOptions,
    #[define(F)] _dtype: ElemType,
    #[define(NQ)] _vector_q: usize,
    #[define(NK)] _vector_k: usize,
    #[define(NV)] _vector_v: usize,
    #[define(ND)] _vector_d_out: usize,
) {
    let cube = CUBE_POS as u32;
    if cube >= tiles * heads {
        terminate!();
    }
    let head = (cube / tiles) as usize;
    let head_kv = head / heads_per_kv as usize;
    let item = work_item(work, cube % tiles, left, right, options);
    let band = item.band;
    let rows = item.q_rows as u32;

    let mut workspace = T::workspace(shape);
    let mut scores = T::scores(shape);
    let mut gradients = T::scores(shape);
    let mut output = T::output(Product::Scores, shape);
    let mut statistics = T::statistics(Axis::Rows, shape);

    let q_at = item.q_start * q.stride(0) + head * q.stride(1);
    T::load_rows::<F, NQ>(&mut workspace, q, q_at, rows, query_scale, Product::Scores, shape);
    let d_out_at = item.q_start * d_out.stride(0) + head * d_out.stride(1);
    T::load_rows::<F, ND>(&mut workspace, d_out, d_out_at, rows, 1.0f32, Product::Weights, shape);
    let heads = heads as usize;
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

        T::load_columns::<F, NV>(&mut workspace, v, v_at, keys, 1.0f32, Product::Weights, shape);
        if comptime!(!shape.one_room) {
            T::load_columns::<F, NK>(&mut workspace, k, k_at, keys, 1.0f32, Product::Scores, shape);
        }
        sync_cube();
        T::mma_ab_t(&workspace, &mut gradients, Product::Weights, shape);
        if comptime!(shape.one_room) {
            sync_cube();
            T::load_columns::<F, NK>(&mut workspace, k, k_at, keys, 1.0f32, Product::Scores, shape);
            sync_cube();
        }
        T::mma_ab_t(&workspace, &mut scores, Product::Scores, shape);
        if comptime!(options.softcap) {
            T::softcap(&mut scores, softcap, shape);
        }
        T::differentiate(
            &mut scores,
            &mut gradients,
            &statistics,
            &band,
            key,
            softcap,
            options.softcap,
            Axis::Rows,
            shape,
        );

        T::stage(&mut workspace, &gradients, shape);
        sync_cube();
        T::mma_ab(&workspace, &mut output, Product::Scores, shape);
        sync_cube();

        key += tile_k;
    }

    let target = dq.origin(item.q_start, head);
    let stride = dq.token_stride;
    T::store::<F>(&output, grads, target, stride, rows, softmax_scale, Product::Scores, shape);
}

/// dk and dv: one cube per (key tile, key head).
///
/// Keys and values are the rows; the queries, scaled by `query_scale`, and d_out of every head that
/// reads them stream past. In the work list queries and keys are swapped: it lists key tiles, whose
/// band says which queries see a key, and `left` and `right` are swapped, too.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn attention_varlen_dkdv<
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
    tiles: u32,
    heads_kv: u32,
    heads_per_kv: u32,
    query_scale: f32,
    softcap: f32,
    left: i32,
    right: i32,
    #[comptime] shape: GradientShape,
    #[comptime] options: ScoreOptions,
    #[define(F)] _dtype: ElemType,
    #[define(NQ)] _vector_q: usize,
    #[define(NK)] _vector_k: usize,
    #[define(NV)] _vector_v: usize,
    #[define(ND)] _vector_d_out: usize,
) {
    let cube = CUBE_POS as u32;
    if cube >= tiles * heads_kv {
        terminate!();
    }
    let head_kv = (cube / tiles) as usize;
    let heads = (heads_kv * heads_per_kv) as usize;
    let item = work_item(work, cube % tiles, left, right, options);
    let band = item.band;
    let rows = item.q_rows as u32;

    let mut workspace = T::workspace(shape);
    let mut scores = T::scores(shape);
    let mut gradients = T::scores(shape);
    let mut d_keys = T::output(Product::Scores, shape);
    let mut d_values = T::output(Product::Weights, shape);
    let mut statistics = T::statistics(Axis::Columns, shape);

    let k_at = item.q_start * k.stride(0) + head_kv * k.stride(1);
    T::load_rows::<F, NK>(&mut workspace, k, k_at, rows, 1.0f32, Product::Scores, shape);
    let v_at = item.q_start * v.stride(0) + head_kv * v.stride(1);
    T::load_rows::<F, NV>(&mut workspace, v, v_at, rows, 1.0f32, Product::Weights, shape);

    let tile_q = comptime!(shape.grid.tile_columns() as i32);
    let end = band.end_key(item.q_rows);
    for group in 0..heads_per_kv as usize {
        let head = head_kv * heads_per_kv as usize + group;
        let mut query = band.first_key();
        while query < end {
            let queries = min(tile_q, band.k_len - query) as u32;
            let token = item.k_start + query as usize;
            let q_at = token * q.stride(0) + head * q.stride(1);
            let d_out_at = token * d_out.stride(0) + head * d_out.stride(1);

            T::load_statistics(
                &mut statistics,
                stats,
                token * heads + head,
                heads,
                queries,
                Axis::Columns,
                shape,
            );
            T::load_columns::<F, ND>(
                &mut workspace,
                d_out,
                d_out_at,
                queries,
                1.0f32,
                Product::Weights,
                shape,
            );
            if comptime!(!shape.one_room) {
                T::load_columns::<F, NQ>(
                    &mut workspace,
                    q,
                    q_at,
                    queries,
                    query_scale,
                    Product::Scores,
                    shape,
                );
            }
            sync_cube();
            T::mma_ab_t(&workspace, &mut gradients, Product::Weights, shape);
            if comptime!(shape.one_room) {
                sync_cube();
                T::load_columns::<F, NQ>(
                    &mut workspace,
                    q,
                    q_at,
                    queries,
                    query_scale,
                    Product::Scores,
                    shape,
                );
                sync_cube();
            }
            T::mma_ab_t(&workspace, &mut scores, Product::Scores, shape);
            if comptime!(options.softcap) {
                T::softcap(&mut scores, softcap, shape);
            }
            T::differentiate(
                &mut scores,
                &mut gradients,
                &statistics,
                &band,
                query,
                softcap,
                options.softcap,
                Axis::Columns,
                shape,
            );

            T::stage(&mut workspace, &gradients, shape);
            sync_cube();
            T::mma_ab(&workspace, &mut d_keys, Product::Scores, shape);
            sync_cube();

            if comptime!(shape.one_room) {
                T::load_columns::<F, ND>(
                    &mut workspace,
                    d_out,
                    d_out_at,
                    queries,
                    1.0f32,
                    Product::Weights,
                    shape,
                );
            }
            T::stage(&mut workspace, &scores, shape);
            sync_cube();
            T::mma_ab(&workspace, &mut d_values, Product::Weights, shape);
            sync_cube();

            query += tile_q;
        }
    }

    // The queries came scaled by softmax_scale / softcap; without softcap that is 1.
    let target = dk.origin(item.q_start, head_kv);
    let stride = dk.token_stride;
    T::store::<F>(&d_keys, grads, target, stride, rows, softcap, Product::Scores, shape);
    let target = dv.origin(item.q_start, head_kv);
    let stride = dv.token_stride;
    T::store::<F>(&d_values, grads, target, stride, rows, 1.0f32, Product::Weights, shape);
}
