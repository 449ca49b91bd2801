//! Per-head RMS norm of q and k, then rotary embedding: the step between projection and attention.

#[cfg(feature = "kernels")]
use burn::backend::Dispatch;
#[cfg(feature = "kernels")]
use burn::tensor::{DType, Device};
use burn::tensor::{Tensor, assert_shape};

#[cfg(feature = "kernels")]
use super::backend::{Norm, Rotation};
use crate::norm::rms_norm;
use crate::rope::{RotaryPositionEmbedding, apply_rotary_pos_emb_vision};

/// The weights of the per-head norms of q and k.
#[derive(Clone, Debug)]
pub struct QkNorm {
    /// Weight for q, `[head_dim]`, shared by its heads.
    pub q_weight: Tensor<1>,
    /// Weight for k, `[head_dim]`, shared by its heads.
    pub k_weight: Tensor<1>,
    /// Added to the mean square.
    pub epsilon: f64,
}

/// Normalises each head of q and k (where `norms` is given) and rotates it (where `rope` is given).
///
/// Norm and rotation run in f32; their results are cast back to the dtype of q and k, the norm's
/// before its weight is applied, as in the reference.
///
/// # Shapes
///
/// - q: `[tokens, heads, head_dim]`
/// - k: `[tokens, heads_k, head_dim]`
/// - rope: for `tokens` and `head_dim`
/// - norms: weights `[head_dim]`
/// - output: q and k, as they came
///
/// # Panics
///
/// When a shape differs from the above.
pub fn rope_qk_norm(
    q: Tensor<3>,
    k: Tensor<3>,
    rope: Option<&RotaryPositionEmbedding>,
    norms: Option<&QkNorm>,
) -> (Tensor<3>, Tensor<3>) {
    check(q.dims(), k.dims(), rope, norms);
    #[cfg(feature = "kernels")]
    if let Some(results) = kernel(&q, &k, rope, norms) {
        return results;
    }
    composed(q, k, rope, norms)
}

/// Checks the shapes of [`rope_qk_norm`]'s arguments, of which q and k have the given ones.
pub(super) fn check(
    q: [usize; 3],
    k: [usize; 3],
    rope: Option<&RotaryPositionEmbedding>,
    norms: Option<&QkNorm>,
) {
    let [tokens, _, head_dim] = q;
    let expected = [tokens, k[1], head_dim];
    assert_eq!(k, expected, "k: expected the tokens and head_dim of q, {expected:?}, got {k:?}");
    if let Some(RotaryPositionEmbedding { cos, sin }) = rope {
        assert!(head_dim.is_multiple_of(2), "q: expected an even head_dim, got {head_dim}");
        assert_shape!(cos, [tokens, head_dim / 2]);
        assert_shape!(sin, [tokens, head_dim / 2]);
    }
    if let Some(QkNorm { q_weight, k_weight, .. }) = norms {
        assert_shape!(q_weight, [head_dim]);
        assert_shape!(k_weight, [head_dim]);
    }
}

/// One pass over q and k by the device's kernel, where it has one.
#[cfg(feature = "kernels")]
fn kernel(
    q: &Tensor<3>,
    k: &Tensor<3>,
    rope: Option<&RotaryPositionEmbedding>,
    norms: Option<&QkNorm>,
) -> Option<(Tensor<3>, Tensor<3>)> {
    use super::backend::PackedAttentionBackend;

    let shapes = [q.dims(), k.dims()];
    if q.dtype() != k.dtype() || !kernel_serves(&q.device(), q.dtype(), shapes, rope, norms) {
        return None;
    }
    let [q, k] = [q, k].map(|tensor| tensor.clone().into_dispatch());
    let (q, k) = Dispatch::packed_rope_qk_norm(q, k, rotation(rope), norm(norms));
    Some((Tensor::from_dispatch(q), Tensor::from_dispatch(k)))
}

/// Whether the device has a kernel for these arguments.
#[cfg(feature = "kernels")]
pub(super) fn kernel_serves(
    device: &Device,
    dtype: DType,
    shapes: [[usize; 3]; 2],
    rope: Option<&RotaryPositionEmbedding>,
    norms: Option<&QkNorm>,
) -> bool {
    let tables = |rope: &RotaryPositionEmbedding| {
        [&rope.cos, &rope.sin].iter().all(|table| table.dtype() == DType::F32 && !learns(table))
    };
    let weights = |norms: &QkNorm| norms.q_weight.dtype() == norms.k_weight.dtype();
    let empty = shapes.iter().any(|shape| shape.contains(&0));
    let nothing_to_do = rope.is_none() && norms.is_none();
    if empty || nothing_to_do || !rope.is_none_or(tables) || !norms.is_none_or(weights) {
        return false;
    }
    let norm_dtype = norms.map(|norms| norms.q_weight.dtype());
    super::kernels::supports_rope_qk_norm(device, dtype, shapes, rope.is_some(), norm_dtype).is_ok()
}

/// Whether gradients flow into a tensor: the kernels have none for the tables.
#[cfg(all(feature = "kernels", feature = "autodiff"))]
fn learns(table: &Tensor<2>) -> bool {
    table.is_tracked()
}

#[cfg(all(feature = "kernels", not(feature = "autodiff")))]
fn learns(_: &Tensor<2>) -> bool {
    false
}

#[cfg(feature = "kernels")]
pub(super) fn rotation(rope: Option<&RotaryPositionEmbedding>) -> Rotation<Dispatch> {
    match rope {
        Some(RotaryPositionEmbedding { cos, sin }) => {
            let [cos, sin] = [cos, sin].map(|table| table.clone().into_dispatch());
            Rotation::Tables { cos, sin }
        }
        None => Rotation::Absent,
    }
}

#[cfg(feature = "kernels")]
pub(super) fn norm(norms: Option<&QkNorm>) -> Norm<Dispatch> {
    match norms {
        Some(QkNorm { q_weight, k_weight, epsilon }) => {
            let [q, k] = [q_weight, k_weight].map(|weight| weight.clone().into_dispatch());
            Norm::Rms { q, k, epsilon: *epsilon }
        }
        None => Norm::Absent,
    }
}

/// Norm, then rotation, in tensor operations.
fn composed(
    q: Tensor<3>,
    k: Tensor<3>,
    rope: Option<&RotaryPositionEmbedding>,
    norms: Option<&QkNorm>,
) -> (Tensor<3>, Tensor<3>) {
    let (q, k) = match norms {
        Some(norms) => (
            rms_norm(q, norms.q_weight.clone(), norms.epsilon),
            rms_norm(k, norms.k_weight.clone(), norms.epsilon),
        ),
        None => (q, k),
    };
    match rope {
        Some(rope) => (
            apply_rotary_pos_emb_vision(q, rope.clone()),
            apply_rotary_pos_emb_vision(k, rope.clone()),
        ),
        None => (q, k),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::VisionRotaryEmbedding;
    use burn::tensor::{Device, Distribution, Tolerance};

    #[test]
    fn norm_comes_before_rotation_and_both_are_optional() {
        let device = Device::flex();
        let random = |heads| Tensor::<3>::random([3, heads, 8], Distribution::Default, &device);
        let (q, k) = (random(4), random(2));
        let norms = QkNorm {
            q_weight: Tensor::random([8], Distribution::Default, &device),
            k_weight: Tensor::random([8], Distribution::Default, &device),
            epsilon: 1e-5,
        };
        let rope = VisionRotaryEmbedding::new(4).prepare(&[[0, 0], [1, 2], [5, 3]], &device);
        let normed = rope_qk_norm(q.clone(), k.clone(), None, Some(&norms));
        let expected = rope_qk_norm(normed.0, normed.1, Some(&rope), None);
        let both = rope_qk_norm(q.clone(), k.clone(), Some(&rope), Some(&norms));
        let close = |a: Tensor<3>, b: Tensor<3>| {
            a.into_data().assert_approx_eq::<f32>(&b.into_data(), Tolerance::absolute(1e-6));
        };
        close(both.0, expected.0);
        close(both.1, expected.1);
        let untouched = rope_qk_norm(q.clone(), k.clone(), None, None);
        untouched.0.into_data().assert_eq(&q.into_data(), true);
        untouched.1.into_data().assert_eq(&k.into_data(), true);
    }

    #[test]
    #[should_panic(expected = "assert_shape!(sin")]
    fn a_sine_table_of_one_token_is_not_spread_over_all() {
        let device = Device::flex();
        let cos = Tensor::ones([3, 4], &device);
        let rope = RotaryPositionEmbedding { cos, sin: Tensor::zeros([1, 4], &device) };
        let q = Tensor::<3>::ones([3, 1, 8], &device);
        rope_qk_norm(q.clone(), q, Some(&rope), None);
    }

    #[test]
    #[should_panic(expected = "k: expected the tokens and head_dim of q")]
    fn q_and_k_of_other_tokens_panic() {
        let device = Device::flex();
        rope_qk_norm(
            Tensor::zeros([3, 1, 8], &device),
            Tensor::zeros([4, 1, 8], &device),
            None,
            None,
        );
    }
}
