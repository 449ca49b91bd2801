//! The three passes.

mod dkdv;
mod dq;
mod statistics;

use cubecl::prelude::*;

pub(crate) use dkdv::attention_varlen_dkdv;
pub(crate) use dq::attention_varlen_dq;
pub(crate) use statistics::attention_varlen_statistics;

/// Where a gradient goes, in elements.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone))]
pub(crate) struct Target {
    pub offset: usize,
    pub token_stride: usize,
    pub head_stride: usize,
}

#[cube]
impl Target {
    fn origin(&self, token: usize, head: usize) -> usize {
        self.offset + token * self.token_stride + head * self.head_stride
    }
}
