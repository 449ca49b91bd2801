//! Stored bytes to parameters.

use burn::tensor::{DType, TensorData};
use half::{bf16, f16};
use rayon::prelude::*;
use safetensors::Dtype;

/// Output rows transposed together: one input row then gives 32 neighbouring values, and 32
/// output rows fit the first-level cache's associativity well enough.
const TILE: usize = 32;
/// Values converted per task.
const CHUNK: usize = 1 << 16;

/// Why bytes were not converted.
#[derive(Debug, PartialEq)]
pub(super) enum ConvertError {
    /// A stored dtype other than BF16, F16, F32.
    Stored,
    /// A finite value that the target turns into infinity.
    OutOfRange(f32),
}

/// The values of `bytes`, little-endian numbers of `stored` dtype in row-major `[rows, columns]`,
/// as `target` (F32, BF16 or F16) with `shape`; transposed first if asked.
pub(super) fn convert(
    bytes: &[u8],
    stored: Dtype,
    [rows, columns]: [usize; 2],
    transpose: bool,
    shape: &[usize],
    target: DType,
) -> Result<TensorData, ConvertError> {
    let columns_if_transposed = transpose.then_some(columns);
    let size = [rows * columns, rows];
    let values = match stored {
        Dtype::F32 => decode(bytes, size, columns_if_transposed, f32::from_le_bytes),
        Dtype::BF16 => {
            decode(bytes, size, columns_if_transposed, |b| bf16::from_le_bytes(b).to_f32())
        }
        Dtype::F16 => {
            decode(bytes, size, columns_if_transposed, |b| f16::from_le_bytes(b).to_f32())
        }
        _ => return Err(ConvertError::Stored),
    };
    match target {
        DType::BF16 => narrow(&values, bf16::from_f32, bf16::to_f32)
            .map(|values| TensorData::new(values, shape.to_vec())),
        DType::F16 => narrow(&values, f16::from_f32, f16::to_f32)
            .map(|values| TensorData::new(values, shape.to_vec())),
        _ => Ok(TensorData::new(values, shape.to_vec())),
    }
}

fn decode<const N: usize>(
    bytes: &[u8],
    [count, rows]: [usize; 2],
    transpose_columns: Option<usize>,
    read: impl Fn([u8; N]) -> f32 + Sync,
) -> Vec<f32> {
    let (values, _) = bytes.as_chunks::<N>();
    let mut out = vec![0f32; count];
    match transpose_columns {
        None => {
            out.par_chunks_mut(CHUNK).zip(values.par_chunks(CHUNK)).for_each(|(out, values)| {
                for (out, value) in out.iter_mut().zip(values) {
                    *out = read(*value);
                }
            })
        }
        Some(columns) => {
            out.par_chunks_mut((TILE * rows).max(1)).enumerate().for_each(|(tile, out)| {
                let (first, width) = (tile * TILE, out.len() / rows);
                for row in 0..rows {
                    let line = &values[row * columns + first..][..width];
                    for (column, value) in line.iter().enumerate() {
                        out[column * rows + row] = read(*value);
                    }
                }
            })
        }
    }
    out
}

fn narrow<T: Copy + Send>(
    values: &[f32],
    round: impl Fn(f32) -> T + Sync,
    widen: impl Fn(T) -> f32 + Sync,
) -> Result<Vec<T>, ConvertError> {
    values
        .par_iter()
        .map(|&value| {
            let rounded = round(value);
            if value.is_finite() && !widen(rounded).is_finite() {
                Err(ConvertError::OutOfRange(value))
            } else {
                Ok(rounded)
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;

    fn bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    proptest! {
        #[test]
        fn transposes(rows in 1usize..70, columns in 1usize..70) {
            let values: Vec<f32> = (0..rows * columns).map(|i| i as f32).collect();
            let data = convert(&bytes(&values), Dtype::F32, [rows, columns], true, &[columns, rows], DType::F32);
            let out = data.unwrap().try_to_vec::<f32>().unwrap();
            for row in 0..rows {
                for column in 0..columns {
                    prop_assert_eq!(out[column * rows + row], values[row * columns + column]);
                }
            }
        }

        /// Half-precision files are read exactly.
        #[test]
        fn widening_is_exact(bits in any::<[u16; 5]>()) {
            let stored: Vec<u8> = bits.iter().flat_map(|bits| bits.to_le_bytes()).collect();
            for (dtype, widen) in [
                (Dtype::BF16, (|bits| bf16::from_bits(bits).to_f32()) as fn(u16) -> f32),
                (Dtype::F16, |bits| f16::from_bits(bits).to_f32()),
            ] {
                let out = convert(&stored, dtype, [1, 5], false, &[5], DType::F32).unwrap();
                for (value, bits) in out.try_to_vec::<f32>().unwrap().iter().zip(bits) {
                    prop_assert_eq!(value.to_bits(), widen(bits).to_bits());
                }
            }
        }
    }

    #[test]
    fn refuses_what_it_would_corrupt() {
        let big = bytes(&[1.0, 70_000.0]);
        let to = |target| convert(&big, Dtype::F32, [1, 2], false, &[2], target);
        assert_eq!(to(DType::F16).unwrap_err(), ConvertError::OutOfRange(70_000.0));
        assert_eq!(to(DType::BF16).unwrap().dtype(), DType::BF16);
        let infinite = bytes(&[f32::INFINITY]);
        assert!(convert(&infinite, Dtype::F32, [1, 1], false, &[1], DType::F16).is_ok());
        let fp8 = convert(&[0; 2], Dtype::F8_E4M3, [1, 2], false, &[2], DType::F32);
        assert_eq!(fp8.unwrap_err(), ConvertError::Stored);
    }
}
