//! The sum of what cubes have summed of the weight gradients.

use cubecl::{ir::ElemType, prelude::*};

use super::WeightGradientBlueprint;

/// Sums rows of `partials`, `[parts_q + parts_k, head_dim]`: the first `parts_q` are of group 0. Each
/// cube sums `COLUMNS` columns of one group.
#[cube(launch_unchecked)]
pub(super) fn weight_gradient<W: Float>(
    partials: &[f32],
    d_weight_q: &mut [W],
    d_weight_k: ComptimeOption<&mut [W]>,
    head_dim: u32,
    parts_q: u32,
    parts_k: u32,
    cubes: u32,
    #[comptime] blueprint: WeightGradientBlueprint,
    #[define(W)] _weight_dtype: ElemType,
) {
    if CUBE_POS as u32 >= cubes {
        terminate!();
    }
    let cubes_per_group = cubes / comptime!(blueprint.groups as u32);
    let group = CUBE_POS as u32 / cubes_per_group;
    let columns = comptime!(WeightGradientBlueprint::COLUMNS as u32);
    let column = CUBE_POS as u32 % cubes_per_group * columns + UNIT_POS % columns;
    let keys = group == 1;
    let first = select(keys, parts_q, 0u32);
    let end = first + select(keys, parts_k, parts_q);
    let sum = column_sum(partials, column, head_dim, first, end, blueprint);
    if UNIT_POS < columns && column < head_dim {
        if group == 0 {
            d_weight_q[column as usize] = W::cast_from(sum);
        }
        #[comptime]
        match d_weight_k {
            ComptimeOption::Some(d_weight_k) => {
                if keys {
                    d_weight_k[column as usize] = W::cast_from(sum);
                }
            }
            ComptimeOption::None => {}
        }
    }
}

/// Sum of rows `first .. end` of a column, the same for all units of the column.
#[cube]
fn column_sum(
    partials: &[f32],
    column: u32,
    head_dim: u32,
    first: u32,
    end: u32,
    #[comptime] blueprint: WeightGradientBlueprint,
) -> f32 {
    let columns = comptime!(WeightGradientBlueprint::COLUMNS as u32);
    let step = comptime!(WeightGradientBlueprint::UNITS_PER_COLUMN as u32);
    let mut own = f32::new(0.0f32);
    if column < head_dim {
        for row in range_stepped(first + UNIT_POS / columns, end, step) {
            own += partials[(row * head_dim + column) as usize];
        }
    }
    let mut room = Shared::<[f32]>::new_slice(comptime!(blueprint.units()));
    room[UNIT_POS as usize] = own;
    sync_cube();
    let mut sum = f32::new(0.0f32);
    #[unroll]
    for i in 0..step {
        sum += room[(UNIT_POS % columns + comptime!(i * columns)) as usize];
    }
    sum
}
