//! Moving tiles between strided tensors and shared memory.

use cubecl::prelude::*;

/// The vector that tiles are held in.
pub(crate) type F4 = Vector<f32, Const<4>>;

/// Copies `tile_rows` rows of `width` vectors of 4 into shared rows of `pitch` vectors, as f32
/// times `factor`. Row 0 starts at element `origin` and rows are `source.stride(0)` apart; rows from `valid` on
/// become zeros and read no memory.
#[cube]
pub(crate) fn load_rows<F: Float, N: Size>(
    source: &Tensor<Vector<F, N>>,
    origin: usize,
    valid: u32,
    factor: f32,
    destination: &mut [F4],
    #[comptime] tile_rows: usize,
    #[comptime] width: usize,
    #[comptime] pitch: usize,
    #[comptime] units: usize,
) {
    let row_stride = source.stride(0);
    // Vectors are only read where neighbours lie side by side, and a stride that the compiler knows
    // takes neither a register through the loops nor multiplications.
    let vector_size = N::value();
    let column_stride =
        if comptime!(vector_size == 4) { 1usize.runtime() } else { source.stride(2) };
    for i in range_stepped(UNIT_POS as usize, comptime!(tile_rows * width), units) {
        let row = i / width;
        let column = i % width;
        let mut value = F4::new(0.0f32);
        if (row as u32) < valid {
            let at = origin + row * row_stride + column * 4 * column_stride;
            value = read_vector(source, at, column_stride) * F4::new(factor);
        }
        destination[row * pitch + column] = value;
    }
}

/// Four elements from element `at` on, as f32: one read where the tensor is bound in vectors of 4,
/// else one per element.
#[cube]
pub(crate) fn read_vector<F: Float, N: Size>(
    source: &Tensor<Vector<F, N>>,
    at: usize,
    stride: usize,
) -> F4 {
    let vector_size = N::value();
    if comptime!(vector_size == 4) {
        F4::cast_from(source[at / 4])
    } else {
        let mut value = F4::empty();
        #[unroll]
        for e in 0..4usize {
            value.insert(e, f32::cast_from(source[at + e * stride].extract(0usize)));
        }
        value
    }
}

/// `sum + a . b`, one fused multiply-add per element.
#[cube]
pub(crate) fn dot(a: F4, b: F4, sum: f32) -> f32 {
    let mut total = sum;
    #[unroll]
    for e in 0..4usize {
        total = fma(a.extract(e), b.extract(e), total);
    }
    total
}
