//! Per-head RMS norm of q and k, then rotary embedding: the step between projection and attention.

use burn::tensor::{Tensor, assert_shape};

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
    check(&q, &k, rope, norms);
    #[cfg(feature = "cube")]
    if let Some(results) = kernel(&q, &k, rope, norms) {
        return results;
    }
    composed(q, k, rope, norms)
}

fn check(
    q: &Tensor<3>,
    k: &Tensor<3>,
    rope: Option<&RotaryPositionEmbedding>,
    norms: Option<&QkNorm>,
) {
    let [tokens, _, head_dim] = q.dims();
    assert_shape!(k, [tokens, _, head_dim]);
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
#[cfg(feature = "cube")]
fn kernel(
    q: &Tensor<3>,
    k: &Tensor<3>,
    rope: Option<&RotaryPositionEmbedding>,
    norms: Option<&QkNorm>,
) -> Option<(Tensor<3>, Tensor<3>)> {
    use super::backend::{Norm, PackedAttentionBackend, Rotation};
    use burn::backend::Dispatch;
    use burn::tensor::DType;

    let device = q.device();
    let tables = |rope: &RotaryPositionEmbedding| [rope.cos.dtype(), rope.sin.dtype()];
    let weights = |norms: &QkNorm| [norms.q_weight.dtype(), norms.k_weight.dtype()];
    let plain = q.dtype() == k.dtype()
        && rope.map(tables).is_none_or(|dtypes| dtypes == [DType::F32; 2])
        && norms.map(weights).is_none_or(|[q, k]| q == k);
    if device.is_autodiff() || !plain || (rope.is_none() && norms.is_none()) {
        return None;
    }
    let norm_dtype = norms.map(|norms| norms.q_weight.dtype());
    let shapes = [q.dims(), k.dims()];
    super::cube::supports_rope_qk_norm(&device, q.dtype(), shapes, rope.is_some(), norm_dtype)
        .ok()?;
    let rotation = match rope {
        Some(RotaryPositionEmbedding { cos, sin }) => {
            let [cos, sin] = [cos, sin].map(|table| table.clone().into_dispatch());
            Rotation::Tables { cos, sin }
        }
        None => Rotation::Absent,
    };
    let norm = match norms {
        Some(QkNorm { q_weight, k_weight, epsilon }) => {
            let [q, k] = [q_weight, k_weight].map(|weight| weight.clone().into_dispatch());
            Norm::Rms { q, k, epsilon: *epsilon }
        }
        None => Norm::Absent,
    };
    let [q, k] = [q, k].map(|tensor| tensor.clone().into_dispatch());
    let (q, k) = Dispatch::packed_rope_qk_norm(q, k, rotation, norm);
    Some((Tensor::from_dispatch(q), Tensor::from_dispatch(k)))
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
    #[should_panic(expected = "assert_shape!(k,")]
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
