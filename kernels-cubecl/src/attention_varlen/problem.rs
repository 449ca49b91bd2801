//! What a caller asks of attention.

use cubecl::ir::ElemType;

use crate::TensorLayout;

/// The supported head dimensions, in words.
pub const HEAD_DIMS: &str = "16 to 256 in steps of 8";

/// One attention call over a packed batch, independent of any device.
///
/// The segments are not part of the problem: they come as a [`WorkList`](crate::WorkList) built for
/// the blueprint's `tile_q`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionProblem {
    /// Queries `[tokens_q, heads, head_dim]`.
    pub q: TensorLayout,
    /// Keys `[tokens_k, heads_kv, head_dim]`; `heads` must be a multiple of `heads_kv`, query head
    /// `h` reads key and value head `h / (heads / heads_kv)`.
    pub k: TensorLayout,
    /// Values `[tokens_k, heads_kv, value_dim]`; `value_dim` may differ from `head_dim`.
    pub v: TensorLayout,
    /// Element type of q, k, v and out: f32, f16 or bf16. Accumulation is always f32.
    pub dtype: ElemType,
    /// Factor on the scores, usually `1 / sqrt(head_dim)`.
    pub softmax_scale: f32,
    /// Whether query `i` of a segment sees only keys `j <= i + k_len - q_len` (bottom-right
    /// aligned).
    pub is_causal: bool,
    /// Keys visible to the left and right of `i + k_len - q_len`, both inclusive; `None` is
    /// unbounded.
    pub window: (Option<usize>, Option<usize>),
    /// `Some(c)` replaces each scaled score `s` by `c * tanh(s / c)`; `c` must be positive.
    pub softcap: Option<f32>,
}

impl AttentionProblem {
    /// A problem over `q`, `k`, `v` with `softmax_scale = 1 / sqrt(head_dim)`, no mask and no
    /// softcap.
    pub fn new(q: TensorLayout, k: TensorLayout, v: TensorLayout, dtype: ElemType) -> Self {
        Self {
            q,
            k,
            v,
            dtype,
            softmax_scale: 1.0 / (q.shape[2] as f32).sqrt(),
            is_causal: false,
            window: (None, None),
            softcap: None,
        }
    }

    /// Query tokens of the batch.
    pub fn tokens_q(&self) -> usize {
        self.q.shape[0]
    }

    /// Key tokens of the batch.
    pub fn tokens_k(&self) -> usize {
        self.k.shape[0]
    }

    /// Query heads.
    pub fn heads(&self) -> usize {
        self.q.shape[1]
    }

    /// Key and value heads.
    pub fn heads_kv(&self) -> usize {
        self.k.shape[1]
    }

    /// Elements per query and key.
    pub fn head_dim(&self) -> usize {
        self.q.shape[2]
    }

    /// Elements per value and output.
    pub fn value_dim(&self) -> usize {
        self.v.shape[2]
    }

    /// Shape of the output, `[tokens_q, heads, value_dim]`.
    pub fn out_shape(&self) -> [usize; 3] {
        [self.tokens_q(), self.heads(), self.value_dim()]
    }

    /// Shape of the log-sum-exp, `[tokens_q, heads]`, f32.
    pub fn lse_shape(&self) -> [usize; 2] {
        [self.tokens_q(), self.heads()]
    }

    /// The window with causality folded in: causal is `right = 0`.
    pub(crate) fn band(&self) -> (Option<usize>, Option<usize>) {
        let (left, right) = self.window;
        (left, if self.is_causal { Some(0) } else { right })
    }

    /// # Panics
    ///
    /// If the shapes do not fit together or softcap is not positive.
    pub(crate) fn check(&self) {
        let expected_k = [self.k.shape[0], self.k.shape[1], self.q.shape[2]];
        assert_eq!(self.k.shape, expected_k, "k: head_dim must be that of q");
        let expected_v = [self.k.shape[0], self.k.shape[1], self.v.shape[2]];
        assert_eq!(self.v.shape, expected_v, "v: tokens and heads must be those of k");
        let (heads, heads_kv) = (self.heads(), self.heads_kv());
        assert!(
            heads_kv > 0 && heads > 0 && heads.is_multiple_of(heads_kv),
            "q: expected a multiple of the {heads_kv} heads of k, got {heads}"
        );
        assert!(
            self.softcap.is_none_or(|cap| cap > 0.0),
            "softcap: expected a positive value, got {:?}",
            self.softcap
        );
    }
}
