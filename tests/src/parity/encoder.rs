//! Towers: patch embedding, each block, output, and the gradient of every parameter.

use std::path::Path;

use burn::module::Param;
use burn::tensor::{DType, Device, Gradients, Tensor};
use burn_dots_vit::checkpoint::{ParameterVisitor, StoredParameter};
use burn_dots_vit::{CheckpointOptions, DotsVisionEncoder, DotsVitConfig, GridThw, TowerStage};
use burn_vision_attention::AttentionImplementation;

use super::{CaseError, Check, Verdict, check, check_values, relative, unless_unsupported};
use crate::devices::NamedDevice;
use crate::fixtures::{EncoderCase, Fixture};

pub(super) struct Tower<'a> {
    pub(super) directory: &'a Path,
    pub(super) case: &'a EncoderCase,
    pub(super) device: &'a NamedDevice,
    pub(super) implementation: AttentionImplementation,
}

impl Tower<'_> {
    pub(super) fn run(&self, gradients: bool) -> Result<Verdict, CaseError> {
        let golden = Fixture::open(self.directory.join(&self.case.data))?;
        let device = match gradients {
            true => self.device.device.clone().autodiff(),
            false => self.device.device.clone(),
        };
        let config = DotsVitConfig::from_file(self.directory.join(&self.case.config))?;
        let weights = self.directory.join(&self.case.weights);
        let (mut tower, report) =
            DotsVisionEncoder::load(&config, weights, &CheckpointOptions::default(), &device)?;
        if !report.unused.is_empty() {
            return Err(format!("weights that nothing uses: {}", report.unused.join(", ")).into());
        }
        tower.set_implementation(self.implementation);
        unless_unsupported(&tower.resolution(&device, DType::F32), || match gradients {
            true => self.gradients(&golden, &tower, &device),
            false => self.outputs(&golden, &tower, &device),
        })
    }

    fn outputs(
        &self,
        golden: &Fixture,
        tower: &DotsVisionEncoder,
        device: &Device,
    ) -> Result<Vec<Check>, CaseError> {
        let (pixel_values, grids) = inputs(golden, device)?;
        let (atol, rtol) = (self.case.atol, self.case.rtol);
        let mut checks = Vec::new();
        let mut stages = Vec::new();
        let out = tower.forward_with(pixel_values, &grids, &mut |stage, x| {
            stages.push((stage, x.clone()));
        })?;
        for (stage, x) in stages {
            let name = match stage {
                TowerStage::PatchEmbed => "expected.patch_embed".to_owned(),
                TowerStage::Block(index) => format!("expected.block.{index}"),
                // The reference shows the input of the last norm and its consequence, the output.
                TowerStage::PostNorm => continue,
            };
            checks.push(check(golden, &name, x, relative(atol, rtol))?);
        }
        checks.push(check(golden, "expected.out", out, relative(atol, rtol))?);
        let expected = golden.names().filter(|name| is_output(name)).count();
        if checks.len() != expected {
            return Err(
                format!("{} of {expected} expected tensors were compared", checks.len()).into()
            );
        }
        Ok(checks)
    }

    fn gradients(
        &self,
        golden: &Fixture,
        tower: &DotsVisionEncoder,
        device: &Device,
    ) -> Result<Vec<Check>, CaseError> {
        let (pixel_values, grids) = inputs(golden, device)?;
        let pixel_values = pixel_values.require_grad();
        let cotangent = golden.tensor::<2>("cotangent", device)?;
        let out = tower.forward(pixel_values.clone(), &grids)?;
        let grads = (out * cotangent).sum().backward();

        let (atol, rtol) = (self.case.grad_atol, self.case.grad_rtol);
        let grad = pixel_values.grad(&grads).ok_or("no gradient of pixel_values")?;
        let mut checks =
            vec![check(golden, "expected.grad.pixel_values", grad, relative(atol, rtol))?];
        let mut compare = Compare { golden, grads: &grads, atol, rtol, result: Ok(Vec::new()) };
        tower.visit_parameters(&mut compare);
        checks.extend(compare.result?);

        let expected = golden.names().filter(|name| name.starts_with("expected.grad.")).count();
        if checks.len() != expected {
            return Err(
                format!("{} of {expected} expected gradients were compared", checks.len()).into()
            );
        }
        Ok(checks)
    }
}

fn is_output(name: &str) -> bool {
    name.starts_with("expected.") && !name.starts_with("expected.grad.")
}

/// Pixel rows and grids of an encoder or checkpoint case.
pub(super) fn inputs(
    golden: &Fixture,
    device: &Device,
) -> Result<(Tensor<2>, Vec<GridThw>), CaseError> {
    let grids = golden.integers("grid_thw")?;
    let grids =
        grids.chunks(3).map(|thw| GridThw::new(thw[0] as usize, thw[1] as usize, thw[2] as usize));
    Ok((golden.tensor::<2>("pixel_values", device)?, grids.collect()))
}

struct Compare<'a> {
    golden: &'a Fixture,
    grads: &'a Gradients,
    atol: f64,
    rtol: f64,
    result: Result<Vec<Check>, CaseError>,
}

impl ParameterVisitor for Compare<'_> {
    fn visit<const D: usize>(&mut self, stored: &StoredParameter, parameter: &Param<Tensor<D>>) {
        let Ok(checks) = &mut self.result else { return };
        let name = format!("expected.grad.{}", stored.name);
        if !self.golden.contains(&name) {
            // The router's bias is a buffer in the reference, without a gradient.
            if !stored.name.ends_with("router_bias") {
                self.result = Err(format!("no golden gradient of {}", stored.name).into());
            }
            return;
        }
        // A parameter that the output does not depend on has no gradient: the reference's is zero.
        let values = match parameter.val().grad(self.grads) {
            Some(grad) => stored.data(grad).iter::<f64>().collect(),
            None => vec![0.0; stored.shape.iter().product()],
        };
        match check_values(
            self.golden,
            &name,
            &stored.shape,
            &values,
            relative(self.atol, self.rtol),
        ) {
            Ok(check) => checks.push(check),
            Err(error) => self.result = Err(error),
        }
    }
}
