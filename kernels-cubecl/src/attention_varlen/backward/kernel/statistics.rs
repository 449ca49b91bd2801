//! lse and delta of every query.

use core::f32::consts::LOG2_E;

use cubecl::{ir::ElemType, prelude::*};

use crate::{
    attention_varlen::backward::AttentionGradBlueprint,
    tile::{F2, MASKED, dot, read_vector},
};

/// Writes lse, in units of ln(2), and delta of every query. Each query has `lanes` units.
///
/// Queries that see no key have lse minus infinity; they get zeros. All their scores are masked, so
/// that no weight comes of it, and what is not finite stays out of the other passes.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn attention_varlen_statistics<F: Float, NO: Size, ND: Size>(
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
        value.insert(0usize, select(unseen, f32::new(0.0f32), lse * LOG2_E));
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
