//! One thing to measure, and what it costs in theory.

use std::fmt;

use burn_dots_vit::DotsVitConfig;
use burn_vision_attention::AttentionImplementation;

use crate::arguments::{Dtype, Heads, Implementation, Operation, Pass};
use crate::layout::Layout;

/// Layers of the tower that is measured; the rest of its config is dots.ocr's.
pub const TOWER_LAYERS: usize = 2;

/// The head layout that comes with norms of q and k, that of dots3-note's tower.
const WITH_QK_NORM: Heads = Heads::new(24, 64);

/// An operation on a batch.
#[derive(Clone, Debug)]
pub struct Case {
    /// What runs.
    pub operation: Operation,
    /// On which heads.
    pub heads: Heads,
    /// On which images.
    pub layout: Layout,
    /// In which float type.
    pub dtype: Dtype,
    /// What of it is timed.
    pub pass: Pass,
}

/// The config of the tower that is measured.
pub fn tower_config(implementation: AttentionImplementation) -> DotsVitConfig {
    let mut config = DotsVitConfig::dots_vit();
    config.num_hidden_layers = TOWER_LAYERS;
    config.attn_implementation = implementation;
    config
}

/// The heads of the tower that is measured.
pub fn tower_heads() -> Heads {
    let config = DotsVitConfig::dots_vit();
    Heads::new(config.num_attention_heads, config.head_dim())
}

impl Case {
    /// Whether q and k are normalised per head.
    pub fn qk_norm(&self) -> bool {
        self.operation != Operation::AttentionVarlen && self.heads == WITH_QK_NORM
    }

    /// Floating-point operations of attention itself: two for each product and sum in
    /// `q k^T` and in `p v`, over the pairs of tokens that see each other (Dao, FlashAttention-2, 2023).
    fn attention_flops(&self) -> f64 {
        4.0 * self.layout.scores() as f64 * self.heads.dim() as f64
    }

    /// Floating-point operations that have to be done, attention's backward pass counted as 2.5 and a
    /// projection's as 2 forward passes; nothing for operations that move memory.
    pub fn flops(&self) -> Option<f64> {
        let (attention_passes, projection_passes) = match self.pass {
            Pass::Forward => (1.0, 1.0),
            Pass::Both => (3.5, 3.0),
            Pass::Backward => (2.5, 2.0),
        };
        let attention = attention_passes * self.attention_flops();
        let (tokens, dim) = (self.layout.tokens() as f64, self.heads.dim() as f64);
        let projections = 8.0 * tokens * dim * dim;
        match self.operation {
            Operation::AttentionVarlen => Some(attention),
            Operation::Layer => Some(attention + projection_passes * projections),
            Operation::Tower => {
                let config = DotsVitConfig::dots_vit();
                let mlp = 6.0 * tokens * dim * config.intermediate_size as f64;
                let embed = 2.0 * tokens * dim * config.pixel_row_len() as f64;
                let square = (config.adapter_merge_size * config.adapter_merge_size) as f64;
                let merged = square * dim;
                let adapter =
                    2.0 * tokens / square * merged * (merged + config.adapter_out_dim as f64);
                let block = attention + projection_passes * (projections + mlp);
                Some(TOWER_LAYERS as f64 * block + projection_passes * (embed + adapter))
            }
            Operation::RopeQkNorm => None,
        }
    }

    /// Bytes that an operation without arithmetic to speak of reads and writes at the least: q and k in
    /// and out; in the backward pass both gradients in and out, and q and k again where they are
    /// normalised; and the f32 tables of each pass.
    pub fn moved_bytes(&self) -> Option<usize> {
        (self.operation == Operation::RopeQkNorm).then(|| {
            let pair = 2 * self.activation();
            let tables = 4 * self.layout.tokens() * self.heads.head_dim;
            let forward = 2 * pair + tables;
            let again = if self.qk_norm() { pair } else { 0 };
            let backward = 2 * pair + again + tables;
            match self.pass {
                Pass::Forward => forward,
                Pass::Both => forward + backward,
                Pass::Backward => backward,
            }
        })
    }

    /// Bytes of the activations and gradients that a caller sees: inputs, outputs and, with a backward
    /// pass, the gradients of inputs and weights.
    pub fn visible_bytes(&self) -> usize {
        let (activation, element) = (self.activation(), self.dtype.bytes());
        let dim = self.heads.dim();
        let norms = if self.qk_norm() { 2 * self.heads.head_dim * element } else { 0 };
        let (forward, gradients) = match self.operation {
            Operation::Layer => (2 * activation, activation + 4 * dim * dim * element + norms),
            Operation::AttentionVarlen => (4 * activation, 3 * activation),
            Operation::RopeQkNorm => (4 * activation, 2 * activation + norms),
            Operation::Tower => {
                let config = DotsVitConfig::dots_vit();
                let pixels = self.layout.tokens() * config.pixel_row_len() * element;
                let merged: usize =
                    self.layout.lengths().map(|length| length * config.adapter_out_dim / 4).sum();
                (pixels + merged * element, 0)
            }
        };
        forward + if self.pass.has_backward() { gradients } else { 0 }
    }

    /// Bytes of f32 scores that an implementation holds at once: all tokens with all tokens for dense
    /// ones; those of every segment where the composed ones keep them for the backward pass.
    pub fn score_bytes(&self, implementation: Implementation) -> usize {
        let tokens = self.layout.tokens();
        let composed = [AttentionImplementation::EagerV2, AttentionImplementation::Sdpa];
        let scores = match implementation {
            dense if dense.is_dense() => tokens * tokens,
            Implementation::Ours(name) if self.pass.has_backward() && composed.contains(&name) => {
                self.layout.scores()
            }
            _ => 0,
        };
        4 * self.heads.heads * scores
    }

    /// Bytes of a tensor of one vector per token.
    fn activation(&self) -> usize {
        self.layout.tokens() * self.heads.dim() * self.dtype.bytes()
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { operation, heads, layout, dtype, pass } = self;
        write!(f, "{operation} {heads} {layout} {dtype}{}", pass.suffix())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    const SDPA: Implementation = Implementation::Ours(AttentionImplementation::Sdpa);
    const FLASH: Implementation = Implementation::Ours(AttentionImplementation::FlashAttention2);

    fn case(operation: Operation, layout: Layout, pass: Pass) -> Case {
        Case { operation, heads: Heads::new(2, 8), layout, dtype: Dtype::F32, pass }
    }

    #[rstest]
    // 2 segments of 3 x 3 scores, 16 numbers a token, two products, a multiplication and an addition.
    #[case(Operation::AttentionVarlen, Pass::Forward, Some(4.0 * 18.0 * 16.0))]
    #[case(Operation::AttentionVarlen, Pass::Both, Some(3.5 * 4.0 * 18.0 * 16.0))]
    #[case(Operation::AttentionVarlen, Pass::Backward, Some(2.5 * 4.0 * 18.0 * 16.0))]
    // 6 tokens through matrices of 16 x 48 and 16 x 16.
    #[case(Operation::Layer, Pass::Forward, Some(1152.0 + 2.0 * 6.0 * 16.0 * 64.0))]
    #[case(Operation::Layer, Pass::Both, Some(3.5 * 1152.0 + 3.0 * 2.0 * 6.0 * 16.0 * 64.0))]
    #[case(Operation::RopeQkNorm, Pass::Forward, None)]
    fn operations_are_counted(
        #[case] operation: Operation,
        #[case] pass: Pass,
        #[case] flops: Option<f64>,
    ) {
        assert_eq!(case(operation, Layout::uniform(2, 3), pass).flops(), flops);
    }

    #[test]
    fn the_tower_counts_what_its_weights_multiply() {
        let layout = Layout::pages();
        let case = Case { heads: tower_heads(), ..case(Operation::Tower, layout, Pass::Forward) };
        let (tokens, dim) = (4096.0, 1536.0);
        let blocks = 2.0 * 2.0 * tokens * (4.0 * dim * dim + 3.0 * dim * 4224.0);
        let embed = 2.0 * tokens * 588.0 * dim;
        let adapter = 2.0 * 1024.0 * (6144.0 * 6144.0 + 6144.0 * 1536.0);
        let attention = 2.0 * case.attention_flops();
        assert_eq!(case.flops(), Some(blocks + embed + adapter + attention));
    }

    #[test]
    fn bytes_are_those_of_inputs_and_outputs() {
        let rope = |pass| case(Operation::RopeQkNorm, Layout::uniform(2, 3), pass);
        let (tensor, tables) = (6 * 16 * 4, 2 * 6 * 4 * 4);
        assert_eq!(rope(Pass::Forward).moved_bytes(), Some(4 * tensor + tables));
        assert_eq!(rope(Pass::Both).moved_bytes(), Some(8 * tensor + 2 * tables));
        assert_eq!(rope(Pass::Backward).moved_bytes(), Some(4 * tensor + tables));
        let normed = Case { heads: Heads::new(24, 64), ..rope(Pass::Both) };
        assert_eq!(normed.moved_bytes(), Some(10 * 96 * tensor + 2 * 8 * tables));
        assert_eq!(rope(Pass::Forward).visible_bytes(), 4 * tensor);
        let attention = case(Operation::AttentionVarlen, Layout::uniform(2, 3), Pass::Both);
        assert_eq!(attention.visible_bytes(), 7 * tensor);
        assert_eq!(attention.moved_bytes(), None);
    }

    #[rstest]
    #[case(Implementation::BurnMasked, Pass::Forward, 4 * 2 * 36)]
    #[case(SDPA, Pass::Forward, 0)]
    #[case(SDPA, Pass::Both, 4 * 2 * 18)]
    #[case(SDPA, Pass::Backward, 4 * 2 * 18)]
    #[case(FLASH, Pass::Both, 0)]
    fn scores_are_counted_where_they_are_held(
        #[case] implementation: Implementation,
        #[case] pass: Pass,
        #[case] bytes: usize,
    ) {
        let case = case(Operation::AttentionVarlen, Layout::uniform(2, 3), pass);
        assert_eq!(case.score_bytes(implementation), bytes);
    }
}
