//! Operands in the order in which the micro-kernel reads them.

use std::ops::Range;

use rayon::prelude::*;

use crate::aligned::Aligned;
use crate::attention_varlen::blocks;
use crate::element::{Element, Real};
use crate::simd::{Kernels, Transpose};
use crate::view::View;

/// Columns of a row that are transposed at a time: with their rows they fit the first cache.
const COLUMNS: usize = 64;

/// A weight `[inputs, 1, outputs]` in panels of `block` columns, `[panels][padded inputs][block]`. Columns
/// beyond the last are zeros; rows beyond the inputs hold anything, and no product reads them.
pub(super) fn weight<T: Element>(
    kernels: &Kernels<T::Compute>,
    weight: &View<'_, T>,
) -> Aligned<T::Compute> {
    /// Panels that a thread packs at a time.
    const PANELS: usize = 8;
    let [inputs, _, outputs] = weight.shape();
    let (block, panel_len) = (kernels.block, kernels.block_len(inputs));
    let mut panels = Aligned::new(outputs.div_ceil(block) * panel_len);
    if panel_len == 0 {
        return panels;
    }
    let turned = weight.transposed();
    panels.par_chunks_mut(PANELS * panel_len).enumerate().for_each(|(index, panels)| {
        let start = index * PANELS * block;
        let columns = start..(start + panels.len() / panel_len * block).min(outputs);
        let padding = columns.len() / block * panel_len..;
        panels[padding].fill(Real::ZERO);
        if inputs > 0 && weight.row(0, 0).is_none() {
            let mut staging = vec![Real::ZERO; inputs * block];
            let one = T::Compute::ONE;
            blocks::pack(kernels, &turned, 0, columns, one, panels, &mut staging);
            return;
        }
        for input in 0..inputs {
            let Some(row) = weight.row(input, 0) else { continue };
            let row = row[columns.clone()].chunks(block);
            for (row, panel) in row.zip(panels.chunks_exact_mut(panel_len)) {
                T::widen_all(row, &mut panel[input * block..][..row.len()]);
            }
        }
    });
    panels
}

/// Numbers that [`rows`] needs for staging.
pub(super) fn staging_len<C>(kernels: &Kernels<C>, inputs: usize) -> usize {
    let wide = kernels.rows.next_multiple_of(kernels.lanes);
    wide * (COLUMNS + inputs)
}

/// Rows `tokens` in tiles, `[tiles][inputs][rows of a tile]`, padded with zeros.
pub(super) fn rows<T: Element>(
    kernels: &Kernels<T::Compute>,
    x: &View<'_, T>,
    tokens: &Range<usize>,
    tiles: &mut [T::Compute],
    staging: &mut [T::Compute],
) {
    let [all, _, inputs] = x.shape();
    if inputs == 0 {
        return;
    }
    let (height, wide) = (kernels.rows, kernels.rows.next_multiple_of(kernels.lanes));
    let (turned, staging) = staging.split_at_mut(wide * COLUMNS);
    for (start, tile) in tokens.clone().step_by(height).zip(tiles.chunks_exact_mut(height * inputs))
    {
        let here = (tokens.end - start).min(height);
        // Whole registers of rows are transposed; those beyond the tile are dropped.
        let reach = (all - start).min(wide);
        let (rows, stride) = x.rows(start..start + reach, 0, staging);
        if here < height {
            tile.fill(Real::ZERO);
        }
        for first in (0..inputs).step_by(COLUMNS) {
            let columns = (inputs - first).min(COLUMNS);
            (kernels.transpose)(Transpose {
                from: &rows[first..],
                from_stride: stride,
                to: turned,
                to_stride: wide,
                rows: reach,
                columns,
                factor: Real::ONE,
            });
            let target = tile[first * height..].chunks_exact_mut(height);
            for (target, row) in target.zip(turned.chunks_exact(wide)).take(columns) {
                for (target, &value) in target.iter_mut().zip(row).take(here) {
                    *target = value;
                }
            }
        }
    }
}
