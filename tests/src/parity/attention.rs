//! Attention layers: outputs, what lies between, and gradients.

use std::path::Path;

use burn::module::Param;
use burn::tensor::{DType, Device, Tensor};
use burn_vision_attention::{
    AttentionImplementation, AttentionOptions, QkNorm, RotaryPositionEmbedding, Segments,
    VisionAttention, VisionAttentionConfig, attention_varlen_by, attention_varlen_with_lse,
    rope_qk_norm,
};

use super::{CaseError, Check, Verdict, check, max_difference, unless_unsupported};
use crate::devices::NamedDevice;
use crate::fixtures::{AttentionCase, Fixture};

pub(super) struct Layer<'a> {
    pub(super) directory: &'a Path,
    pub(super) case: &'a AttentionCase,
    pub(super) device: &'a NamedDevice,
    pub(super) implementation: AttentionImplementation,
}

impl Layer<'_> {
    pub(super) fn run(&self, gradients: bool) -> Result<Verdict, CaseError> {
        let golden = Fixture::open(self.directory.join(&self.case.file))?;
        let dtype = golden.data("hidden_states")?.dtype();
        if !self.device.device.supports_dtype(dtype) {
            let reason = format!("{} does not compute in {}", self.device, dtype.name());
            return Ok(Verdict::Skipped(reason));
        }
        let device = match gradients {
            true => self.device.device.clone().autodiff(),
            false => self.device.device.clone(),
        };
        let attention = self.load(&golden, &device)?;
        unless_unsupported(&attention.resolution(&device, dtype), || match gradients {
            true => self.gradients(&golden, &attention, &device),
            false => self.outputs(&golden, &attention, &device, dtype),
        })
    }

    fn load(&self, golden: &Fixture, device: &Device) -> Result<VisionAttention, CaseError> {
        let mut attention = VisionAttentionConfig::new(self.case.dim, self.case.num_heads)
            .with_bias(self.case.bias)
            .with_is_causal(self.case.is_causal)
            .with_rms_norm_eps(self.case.rms_norm_eps)
            .with_use_qk_norm(self.case.use_qk_norm)
            .with_implementation(self.implementation)
            .try_init(device)?;
        let matrix = |name: &str| -> Result<Param<Tensor<2>>, CaseError> {
            let weight = golden.tensor::<2>(&format!("param.{name}"), device)?;
            // Burn's Linear holds its weight as [in, out].
            Ok(Param::from_tensor(weight.transpose()))
        };
        let vector = |name: &str| -> Result<Param<Tensor<1>>, CaseError> {
            Ok(Param::from_tensor(golden.tensor::<1>(&format!("param.{name}"), device)?))
        };
        attention.qkv.weight = matrix("qkv.weight")?;
        attention.proj.weight = matrix("proj.weight")?;
        if self.case.bias {
            attention.qkv.bias = Some(vector("qkv.bias")?);
            attention.proj.bias = Some(vector("proj.bias")?);
        }
        if let (Some(q_norm), Some(k_norm)) = (&mut attention.q_norm, &mut attention.k_norm) {
            q_norm.weight = vector("q_norm.weight")?;
            k_norm.weight = vector("k_norm.weight")?;
        }
        Ok(attention)
    }

    fn inputs(
        &self,
        golden: &Fixture,
        device: &Device,
    ) -> Result<(Tensor<2>, Segments, Option<RotaryPositionEmbedding>), CaseError> {
        let x = golden.tensor::<2>("hidden_states", device)?;
        let segments = Segments::from_offsets(&golden.integers("cu_seqlens")?, x.dims()[0])?;
        let rope = match self.case.rotary {
            true => Some(golden.tensor::<2>("rotary_pos_emb", device)?.into()),
            false => None,
        };
        Ok((x, segments, rope))
    }

    fn outputs(
        &self,
        golden: &Fixture,
        attention: &VisionAttention,
        device: &Device,
        dtype: DType,
    ) -> Result<Vec<Check>, CaseError> {
        let (x, segments, rope) = self.inputs(golden, device)?;
        let out = attention.try_forward(x.clone(), &segments, rope.as_ref())?;
        let bound = self.bound(golden, "out", self.case.atol)?;
        let mut checks = vec![check(golden, "expected.out", out, |_| bound)?];
        // The reference returns nothing between input and output to compare low precision with.
        if dtype == DType::F32 {
            checks.extend(self.intermediates(golden, attention, x, &segments, rope.as_ref())?);
        }
        Ok(checks)
    }

    fn intermediates(
        &self,
        golden: &Fixture,
        attention: &VisionAttention,
        x: Tensor<2>,
        segments: &Segments,
        rope: Option<&RotaryPositionEmbedding>,
    ) -> Result<Vec<Check>, CaseError> {
        let (tokens, heads) = (x.dims()[0], self.case.num_heads);
        let qkv = attention.qkv.forward(x).reshape([tokens, 3, heads, attention.head_dim()]);
        let part = |index| qkv.clone().narrow(1, index, 1).squeeze_dim::<3>(1);
        let norms = attention.q_norm.as_ref().zip(attention.k_norm.as_ref()).map(|(q, k)| QkNorm {
            q_weight: q.weight.val(),
            k_weight: k.weight.val(),
            epsilon: self.case.rms_norm_eps,
        });
        let (q, k) = rope_qk_norm(part(0), part(1), rope, norms.as_ref());
        let v = part(2);
        let options = AttentionOptions { is_causal: self.case.is_causal, ..Default::default() };
        let tensors = || (q.clone(), k.clone(), v.clone());
        let (query, key, value) = tensors();
        let context = attention_varlen_by(
            self.implementation,
            query,
            key,
            value,
            segments,
            segments,
            &options,
        );
        let (query, key, value) = tensors();
        let (_, lse) = attention_varlen_with_lse(query, key, value, segments, segments, &options);
        let atol = self.case.atol;
        Ok(vec![
            check(golden, "expected.q", q, |_| atol)?,
            check(golden, "expected.k", k, |_| atol)?,
            check(golden, "expected.v", v, |_| atol)?,
            check(golden, "expected.context", context, |_| atol)?,
            check(golden, "expected.lse", lse, |_| atol)?,
        ])
    }

    fn gradients(
        &self,
        golden: &Fixture,
        attention: &VisionAttention,
        device: &Device,
    ) -> Result<Vec<Check>, CaseError> {
        let (x, segments, rope) = self.inputs(golden, device)?;
        let x = x.require_grad();
        let cotangent = golden.tensor::<2>("cotangent", device)?;
        let out = attention.try_forward(x.clone(), &segments, rope.as_ref())?;
        let grads = (out * cotangent).sum().backward();

        let bound = self.bound(golden, "grad.hidden_states", self.case.grad_atol)?;
        let grad = x.grad(&grads).ok_or("no gradient of hidden_states")?;
        let mut checks = vec![check(golden, "expected.grad.hidden_states", grad, |_| bound)?];
        // The reference kept no gradient of the weights in low precision.
        if golden.data("hidden_states")?.dtype() != DType::F32 {
            return Ok(checks);
        }
        let atol = self.case.grad_atol;
        let linears = [("qkv", &attention.qkv), ("proj", &attention.proj)];
        for (name, linear) in linears {
            let grad = linear.weight.grad(&grads).ok_or("no gradient of a weight")?;
            let key = format!("expected.grad.{name}.weight");
            checks.push(check(golden, &key, grad.transpose(), |_| atol)?);
            if let Some(bias) = &linear.bias {
                let grad = bias.grad(&grads).ok_or("no gradient of a bias")?;
                checks.push(check(golden, &format!("expected.grad.{name}.bias"), grad, |_| atol)?);
            }
        }
        let norms = [("q_norm", &attention.q_norm), ("k_norm", &attention.k_norm)];
        for (name, norm) in norms {
            if let Some(norm) = norm {
                let grad = norm.weight.grad(&grads).ok_or("no gradient of a norm")?;
                checks
                    .push(check(golden, &format!("expected.grad.{name}.weight"), grad, |_| atol)?);
            }
        }
        Ok(checks)
    }

    /// `2 * max |reference - expected| + atol`, from the reference's implementation of the same
    /// name where it has one and its most accurate one otherwise; `atol` alone without a reference.
    fn bound(&self, golden: &Fixture, tensor: &str, atol: f64) -> Result<f64, CaseError> {
        let expected = golden.values(&format!("expected.{tensor}"))?;
        let error = |implementation: AttentionImplementation| -> Result<Option<f64>, CaseError> {
            let name = format!("reference.{implementation}.{tensor}");
            match golden.contains(&name) {
                true => Ok(Some(max_difference(&golden.values(&name)?, &expected))),
                false => Ok(None),
            }
        };
        let mut errors = Vec::new();
        for implementation in AttentionImplementation::ALL {
            errors.extend(error(implementation)?);
        }
        let best = errors.into_iter().reduce(f64::min).unwrap_or(0.0);
        Ok(2.0 * error(self.implementation)?.unwrap_or(best) + atol)
    }
}
