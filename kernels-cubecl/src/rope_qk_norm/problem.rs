//! What a caller asks of the fused norm and rotation.

use cubecl::ir::ElemType;

use crate::TensorLayout;

/// Per-head RMS norm of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RmsNorm {
    /// Added to the mean square before the root.
    pub epsilon: f32,
    /// Element type of both weights.
    pub weight_dtype: ElemType,
}

/// One fused call, independent of any device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RopeQkNormProblem {
    /// Queries `[tokens, heads, head_dim]`; any strides, so also a slice of a packed projection
    /// `[tokens, 3, heads, head_dim]`.
    pub q: TensorLayout,
    /// Keys `[tokens, heads_kv, head_dim]`; any strides.
    pub k: TensorLayout,
    /// Element type of q, k and the outputs: f32, f16 or bf16. Arithmetic is always f32.
    pub dtype: ElemType,
    /// Per-head RMS norm before the rotation.
    pub norm: Option<RmsNorm>,
    /// Element strides of the f32 cos and sin tables `[tokens, head_dim / 2]`; `None` leaves out
    /// the rotation.
    pub rotary: Option<[[usize; 2]; 2]>,
}

impl RopeQkNormProblem {
    /// A rotation of `q` and `k` by contiguous tables, without norm.
    pub fn new(q: TensorLayout, k: TensorLayout, dtype: ElemType) -> Self {
        Self { q, k, dtype, norm: None, rotary: Some([[q.shape[2] / 2, 1]; 2]) }
    }

    /// Tokens of the batch.
    pub fn tokens(&self) -> usize {
        self.q.shape[0]
    }

    /// Elements per head.
    pub fn head_dim(&self) -> usize {
        self.q.shape[2]
    }

    /// # Panics
    ///
    /// If q and k differ in anything but the number of heads.
    pub(crate) fn check(&self) {
        let expected = [self.tokens(), self.k.shape[1], self.head_dim()];
        assert_eq!(self.k.shape, expected, "k: tokens and head_dim must be those of q");
    }
}
