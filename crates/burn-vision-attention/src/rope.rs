//! Two-dimensional rotary position embedding of patches.

use std::sync::{Arc, RwLock};

use burn::tensor::{DType, Device, Tensor, TensorData, assert_shape};
use thiserror::Error;

use crate::norm::to_compute_dtype;

/// A head dimension that two axes of pairs do not fill.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "head_dim = {head_dim} with 2D RoPE: expected a positive multiple of 4, since rows and columns each \
     turn half of its pairs"
)]
pub struct RopeHeadDimError {
    /// The dimensions of one head.
    pub head_dim: usize,
}

/// Rotation angles of 2D rotary embedding: each head dimension's first half of pairs turns with the
/// row, the second half with the column.
///
/// `inv_freq[k] = theta^(-2k / dim)` for `k` in `0..dim / 2`, and a patch at `(row, column)` has the
/// angles `[row * inv_freq, column * inv_freq]` (Su et al., RoFormer, 2021, with the axial split of
/// Qwen2-VL). All arithmetic is f32, as the reference's, whatever the model's dtype.
#[derive(Clone, Debug)]
pub struct VisionRotaryEmbedding {
    inv_freq: Vec<f32>,
    /// Cosines and sines of positions `0..n`, grown on demand; absent without cache.
    cache: Option<Arc<RwLock<Tables>>>,
}

#[derive(Debug, Default)]
struct Tables {
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl VisionRotaryEmbedding {
    /// An embedding for heads of `2 * dim` dimensions, with theta 10,000 and no cache.
    ///
    /// # Panics
    ///
    /// When `dim` is 0 or odd: the two axes share it.
    pub fn new(dim: usize) -> Self {
        Self::with_theta(dim, 10_000.0)
    }

    /// As [`VisionRotaryEmbedding::new`], for heads of `head_dim` dimensions that a configuration sets.
    ///
    /// # Errors
    ///
    /// When `head_dim` is not a positive multiple of 4.
    pub fn for_head_dim(head_dim: usize) -> Result<Self, RopeHeadDimError> {
        if head_dim == 0 || !head_dim.is_multiple_of(4) {
            return Err(RopeHeadDimError { head_dim });
        }
        Ok(Self::new(head_dim / 2))
    }

    /// As [`VisionRotaryEmbedding::new`], keeping the table of cosines and sines between calls.
    /// The table grows to the largest position asked for.
    ///
    /// # Panics
    ///
    /// When `dim` is 0 or odd.
    pub fn cached(dim: usize) -> Self {
        Self::new(dim).with_cache()
    }

    /// As [`VisionRotaryEmbedding::new`], with another base of the frequencies.
    ///
    /// # Panics
    ///
    /// When `dim` is 0 or odd.
    pub fn with_theta(dim: usize, theta: f32) -> Self {
        assert!(
            dim > 0 && dim.is_multiple_of(2),
            "dim: expected head_dim / 2, a positive even number, got {dim}"
        );
        let inv_freq =
            (0..dim / 2).map(|k| 1.0 / theta.powf(2.0 * k as f32 / dim as f32)).collect();
        Self { inv_freq, cache: None }
    }

    /// Turns the cache on.
    pub fn with_cache(mut self) -> Self {
        self.cache = Some(Arc::default());
        self
    }

    /// Half the head dimension.
    pub fn dim(&self) -> usize {
        2 * self.inv_freq.len()
    }

    /// The number of positions that the cache holds at present (0 without cache).
    pub fn cached_positions(&self) -> usize {
        let Some(cache) = &self.cache else { return 0 };
        let tables = cache.read().unwrap_or_else(|poisoned| poisoned.into_inner());
        tables.cos.len() / self.inv_freq.len()
    }

    /// The angles of one axis for positions `0..seqlen`: `[seqlen, dim / 2]`, f32, in radians.
    pub fn forward(&self, seqlen: usize, device: &Device) -> Tensor<2> {
        let angles = (0..seqlen as u32).flat_map(|position| self.axis_angles(position)).collect();
        matrix(angles, seqlen, self.inv_freq.len(), device)
    }

    /// The angles of patches at the given `(row, column)` positions: `[positions, dim]`, f32, radians.
    pub fn angles(&self, positions: &[[u32; 2]], device: &Device) -> Tensor<2> {
        let angles =
            positions.iter().flatten().flat_map(|&position| self.axis_angles(position)).collect();
        matrix(angles, positions.len(), self.dim(), device)
    }

    /// The cosines and sines of patches at the given `(row, column)` positions, ready for all layers.
    ///
    /// They are computed on the host, whose `cos` is exact to the last bit for any angle; a GPU's
    /// own is only specified near zero.
    pub fn prepare(&self, positions: &[[u32; 2]], device: &Device) -> RotaryPositionEmbedding {
        let count = positions.iter().flatten().max().map_or(0, |&position| position as usize + 1);
        let (cos, sin) = match &self.cache {
            Some(cache) => {
                self.grow(cache, count);
                let tables = cache.read().unwrap_or_else(|poisoned| poisoned.into_inner());
                (self.gather(&tables.cos, positions), self.gather(&tables.sin, positions))
            }
            None => {
                let mut tables = Tables::default();
                self.extend(&mut tables, count);
                (self.gather(&tables.cos, positions), self.gather(&tables.sin, positions))
            }
        };
        RotaryPositionEmbedding {
            cos: matrix(cos, positions.len(), self.dim(), device),
            sin: matrix(sin, positions.len(), self.dim(), device),
        }
    }

    fn axis_angles(&self, position: u32) -> impl Iterator<Item = f32> + '_ {
        self.inv_freq.iter().map(move |frequency| position as f32 * frequency)
    }

    fn grow(&self, cache: &RwLock<Tables>, count: usize) {
        if self.cached_positions() < count {
            let mut tables = cache.write().unwrap_or_else(|poisoned| poisoned.into_inner());
            self.extend(&mut tables, count);
        }
    }

    fn extend(&self, tables: &mut Tables, count: usize) {
        for position in tables.cos.len() / self.inv_freq.len()..count {
            for angle in self.axis_angles(position as u32) {
                tables.cos.push(f64::from(angle).cos() as f32);
                tables.sin.push(f64::from(angle).sin() as f32);
            }
        }
    }

    fn gather(&self, table: &[f32], positions: &[[u32; 2]]) -> Vec<f32> {
        let width = self.inv_freq.len();
        let mut values = Vec::with_capacity(positions.len() * 2 * width);
        for &position in positions.iter().flatten() {
            values.extend_from_slice(&table[position as usize * width..][..width]);
        }
        values
    }
}

fn matrix(values: Vec<f32>, rows: usize, columns: usize, device: &Device) -> Tensor<2> {
    Tensor::from_data(TensorData::new(values, [rows, columns]), (device, DType::F32))
}

/// Cosines and sines of every token's angles, made once and shared by all layers.
///
/// Both are f32 `[tokens, head_dim / 2]`: entry `i` turns the pair `(i, i + head_dim / 2)` of each
/// head (half-split, "NeoX" pairing).
#[derive(Clone, Debug)]
pub struct RotaryPositionEmbedding {
    /// Cosines, f32 `[tokens, head_dim / 2]`.
    pub cos: Tensor<2>,
    /// Sines, f32 `[tokens, head_dim / 2]`.
    pub sin: Tensor<2>,
}

impl RotaryPositionEmbedding {
    /// From angles `[tokens, head_dim / 2]` in radians.
    pub fn from_angles(angles: Tensor<2>) -> Self {
        let angles = to_compute_dtype(angles);
        Self { cos: angles.clone().cos(), sin: angles.sin() }
    }

    /// The number of tokens.
    pub fn tokens(&self) -> usize {
        self.cos.dims()[0]
    }

    /// The head dimension that the tables are for.
    pub fn head_dim(&self) -> usize {
        2 * self.cos.dims()[1]
    }
}

impl From<Tensor<2>> for RotaryPositionEmbedding {
    /// The tensor holds angles; see [`RotaryPositionEmbedding::from_angles`].
    fn from(angles: Tensor<2>) -> Self {
        Self::from_angles(angles)
    }
}

/// `[-x2, x1]` where `x1` and `x2` are the halves of the last dimension; any shape `[..., head_dim]`.
///
/// # Panics
///
/// When the last dimension is odd.
pub fn rotate_half<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    let head_dim = x.dims()[D - 1];
    assert!(head_dim.is_multiple_of(2), "x: expected an even last dimension, got {head_dim}");
    let half = head_dim / 2;
    let first = x.clone().narrow(D - 1, 0, half);
    let second = x.narrow(D - 1, half, half);
    Tensor::cat(vec![-second, first], D - 1)
}

/// Rotates every head of `x` by its token's angles: `x * cos + rotate_half(x) * sin` in f32, cast
/// back to the dtype of `x`.
///
/// # Shapes
///
/// - x: `[tokens, heads, head_dim]`
/// - rotary_pos_emb: angles `[tokens, head_dim / 2]`, or a prepared [`RotaryPositionEmbedding`]
/// - output: as x
///
/// # Panics
///
/// When the embedding is for another number of tokens or another `head_dim`.
pub fn apply_rotary_pos_emb_vision(
    x: Tensor<3>,
    rotary_pos_emb: impl Into<RotaryPositionEmbedding>,
) -> Tensor<3> {
    let rope = rotary_pos_emb.into();
    let (dtype, half) = (x.dtype(), rope.head_dim() / 2);
    assert_shape!(x, [rope.tokens(), _, rope.head_dim()]);
    let sin = &rope.sin;
    assert_shape!(sin, [rope.tokens(), half]);
    let x = to_compute_dtype(x);
    let compute = x.dtype();
    let cos = rope.cos.cast(compute).unsqueeze_dim::<3>(1);
    let sin = rope.sin.cast(compute).unsqueeze_dim::<3>(1);
    // The tables hold half a head: rotate the halves directly instead of doubling the tables.
    let first = x.clone().narrow(2, 0, half);
    let second = x.narrow(2, half, half);
    let rotated = vec![
        first.clone() * cos.clone() - second.clone() * sin.clone(),
        second * cos + first * sin,
    ];
    Tensor::cat(rotated, 2).cast(dtype)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use burn::tensor::Tolerance;
    use rstest::rstest;

    #[rstest]
    #[case(0)]
    #[case(6)]
    #[case(33)]
    fn heads_that_are_no_multiple_of_4_are_an_error(#[case] head_dim: usize) {
        let error = VisionRotaryEmbedding::for_head_dim(head_dim).unwrap_err();
        assert_eq!(error, RopeHeadDimError { head_dim });
        assert_eq!(VisionRotaryEmbedding::for_head_dim(72).unwrap().dim(), 36);
    }

    #[test]
    fn the_angle_table_is_position_times_frequency() {
        let device = Device::flex();
        let rope = VisionRotaryEmbedding::new(4);
        let table = rope.forward(3, &device);
        let expected = TensorData::from([[0.0_f32, 0.0], [1.0, 0.01], [2.0, 0.02]]);
        table.into_data().assert_approx_eq::<f32>(&expected, Tolerance::absolute(1e-7));
        let angles = rope.angles(&[[2, 1]], &device);
        let expected = TensorData::from([[2.0_f32, 0.02, 1.0, 0.01]]);
        angles.into_data().assert_approx_eq::<f32>(&expected, Tolerance::absolute(1e-7));
    }

    #[test]
    fn the_cache_grows_on_demand_and_changes_nothing() {
        let device = Device::flex();
        let (plain, cached) = (VisionRotaryEmbedding::new(16), VisionRotaryEmbedding::cached(16));
        for positions in [vec![[0, 3]], vec![[57, 2], [1, 1]], vec![[5, 5]]] {
            let (plain, cached) =
                (plain.prepare(&positions, &device), cached.prepare(&positions, &device));
            plain.cos.into_data().assert_eq(&cached.cos.into_data(), true);
            plain.sin.into_data().assert_eq(&cached.sin.into_data(), true);
        }
        assert_eq!(cached.cached_positions(), 58);
        assert_eq!(plain.cached_positions(), 0);
    }

    #[test]
    fn rotation_equals_its_definition() {
        let device = Device::flex();
        let x = Tensor::<3>::random([5, 2, 8], burn::tensor::Distribution::Default, &device);
        let angles = VisionRotaryEmbedding::new(4)
            .angles(&[[0, 0], [3, 1], [1, 9], [30, 2], [4, 4]], &device);
        let doubled = Tensor::cat(vec![angles.clone(), angles.clone()], 1).unsqueeze_dim::<3>(1);
        let expected = x.clone() * doubled.clone().cos() + rotate_half(x.clone()) * doubled.sin();
        let rotated = apply_rotary_pos_emb_vision(x, angles);
        rotated
            .into_data()
            .assert_approx_eq::<f32>(&expected.into_data(), Tolerance::absolute(1e-6));
    }

    #[test]
    #[should_panic(expected = "expected an even last dimension, got 3")]
    fn an_odd_head_panics() {
        rotate_half(Tensor::<2>::zeros([1, 3], &Device::flex()));
    }
}
