//! The choices a config makes by name.

use serde::{Deserialize, Serialize};

/// Declares an enum whose variants are the names a `config.json` uses, with `FromStr`, `Display`
/// and the list of names for error messages.
macro_rules! named_enum {
    ($(#[$meta:meta])* $name:ident { $($(#[$variant_meta:meta])* $variant:ident = $text:literal),+ $(,)? }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
        pub enum $name {
            $($(#[$variant_meta])* #[serde(rename = $text)] $variant),+
        }

        impl $name {
            /// Every accepted name, in declaration order.
            pub const NAMES: &'static [&'static str] = &[$($text),+];

            /// The name as written in `config.json`.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $text),+ }
            }
        }

        impl std::str::FromStr for $name {
            type Err = String;

            /// Parses one of [`Self::NAMES`]; the error text lists them.
            fn from_str(text: &str) -> Result<Self, Self::Err> {
                match text {
                    $($text => Ok(Self::$variant),)+
                    _ => Err(format!("expected one of {}", Self::NAMES.join(", "))),
                }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }
    };
}

named_enum! {
    /// Which released tower the defaults come from.
    DotsModelType {
        /// The dense tower of dots.ocr.
        DotsVit = "dots_vit",
        /// The mixture-of-experts tower of dots3-note.
        DotsMoeVit = "dots_moe_vit",
    }
}

named_enum! {
    /// How 2 x 2 patches become one output token.
    AdapterType {
        /// LayerNorm per patch, then an MLP over groups of consecutive tokens.
        PatchMerger = "patch_merger",
        /// 2 x 2 pixel unshuffle of row-major tokens, then LayerNorm and an MLP.
        PixelShuffleMlp = "pixel_shuffle_mlp",
    }
}

named_enum! {
    /// Router logits to expert probabilities.
    RouterScoring {
        /// Each expert on its own.
        Sigmoid = "sigmoid",
        /// Experts compete.
        Softmax = "softmax",
    }
}

named_enum! {
    /// What happens to the selected experts' probabilities before they weigh the outputs.
    ///
    /// Both agree to about 5e-6 in f32 when [`router_scale`](super::DotsVitConfig::router_scale) is 1, which is what
    /// the released model has.
    RouterSemantics {
        /// vLLM and sglang: sigmoid probabilities are normalised (`+ 1e-9`) when more than one
        /// expert is selected, scaled, rounded to the tower's dtype, and the combined output is
        /// divided by their sum. That last division cancels `router_scale`.
        Serving = "serving",
        /// transformers: probabilities are normalised (`+ 1e-20`) and scaled, nothing is divided
        /// afterwards, so `router_scale` multiplies the output. Sigmoid scoring only.
        Transformers = "transformers",
    }
}

named_enum! {
    /// Precision of the cosine and sine tables of the rotary embedding.
    RopeTableDtype {
        /// As computed.
        Float32 = "float32",
        /// Angles rounded to bfloat16 first, as vLLM serves the model.
        Bfloat16 = "bfloat16",
    }
}
