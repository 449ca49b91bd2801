//! Several devices and what to do with them.

use std::error::Error;

use burn::tensor::Device;
#[cfg(any(feature = "cuda", feature = "wgpu"))]
use burn::tensor::DeviceType;
use burn::tensor::distributed::{DistributedConfig, ReduceOperation};
use burn::train::{ExecutionStrategy, MultiDeviceOptim};
use clap::ValueEnum;
use examples::devices;

/// How devices share the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Strategy {
    /// One device does everything
    Single,
    /// Every device takes batches; the first sums the gradients and updates the weights
    Multi,
    /// As multi, but every device updates a part of the weights
    Sharded,
    /// Every device updates weights of its own after a collective sum of the gradients: cuda with NCCL
    Ddp,
}

/// The device's name without its number.
pub fn kind(name: &str) -> &str {
    name.split(':').next().unwrap_or(name)
}

/// Opens devices by the names on the command line: all of one kind, `cuda:1` for the second.
///
/// # Errors
///
/// When a device is unknown, not built in, not there, or of another kind than the first.
pub fn open(names: &[String]) -> Result<Vec<Device>, Box<dyn Error>> {
    if let Some(other) = names.iter().find(|name| kind(name) != kind(&names[0])) {
        let first = &names[0];
        return Err(
            format!("--device {first} and {other}: devices of a run are of one kind").into()
        );
    }
    names.iter().map(|name| open_one(name)).collect()
}

fn open_one(name: &str) -> Result<Device, Box<dyn Error>> {
    let Some((kind, index)) = name.split_once(':') else {
        return Ok(devices::device(name)?.device);
    };
    let device = devices::device(kind)?.device;
    let found = match kind {
        #[cfg(feature = "cuda")]
        "cuda" => enumerate(DeviceType::Cuda),
        #[cfg(feature = "wgpu")]
        "wgpu" => enumerate(DeviceType::Wgpu),
        _ => vec![device],
    };
    let device = index.parse().ok().and_then(|index: usize| found.get(index).cloned());
    let count = found.len();
    device.ok_or_else(|| {
        format!("device `{name}`: expected a number under {count}, that of {kind} devices here")
            .into()
    })
}

#[cfg(any(feature = "cuda", feature = "wgpu"))]
fn enumerate(kind: DeviceType) -> Vec<Device> {
    Device::enumerate(kind).to_vec()
}

/// Burn's strategy for these devices.
///
/// # Errors
///
/// When there are too few or too many devices for it, or they have no collective operations.
pub fn strategy(
    asked: Option<Strategy>,
    kind: &str,
    devices: &[Device],
) -> Result<ExecutionStrategy, Box<dyn Error>> {
    let count = devices.len();
    let strategy = asked.unwrap_or(if count == 1 { Strategy::Single } else { Strategy::Multi });
    if strategy == Strategy::Single {
        if count > 1 {
            return Err(format!("--strategy single takes one --device, got {count}").into());
        }
        return Ok(ExecutionStrategy::single(devices[0].clone()));
    }
    if count == 1 {
        return Err(
            "--strategy needs several devices: name each after --device, as in cuda:0,cuda:1"
                .into(),
        );
    }
    let devices = devices.to_vec();
    Ok(match strategy {
        Strategy::Sharded => ExecutionStrategy::multi(devices, MultiDeviceOptim::OptimSharded),
        Strategy::Ddp if kind != "cuda" => {
            return Err(format!(
                "--strategy ddp: Burn has collective operations for cuda alone, not {kind}; use multi"
            )
            .into());
        }
        Strategy::Ddp => {
            let devices = devices.into_iter().map(Device::autodiff).collect();
            let config = DistributedConfig { all_reduce_op: ReduceOperation::Mean };
            ExecutionStrategy::ddp(devices, config)
        }
        _ => ExecutionStrategy::multi(devices, MultiDeviceOptim::OptimMainDevice),
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use rstest::rstest;

    use super::*;

    fn names(list: &str) -> Vec<String> {
        list.split(',').map(str::to_owned).collect()
    }

    #[rstest]
    #[case("flex", None, Ok(1))]
    #[case("flex:0", Some(Strategy::Single), Ok(1))]
    #[case("flex,flex", None, Ok(2))]
    #[case("flex,flex:0", Some(Strategy::Sharded), Ok(2))]
    #[case("flex,flex", Some(Strategy::Single), Err("--strategy single takes one --device, got 2"))]
    #[case(
        "flex",
        Some(Strategy::Multi),
        Err("--strategy needs several devices: name each after --device, as in cuda:0,cuda:1")
    )]
    #[case(
        "flex,flex",
        Some(Strategy::Ddp),
        Err("--strategy ddp: Burn has collective operations for cuda alone, not flex; use multi")
    )]
    #[case("flex,cuda", None, Err("--device flex and cuda: devices of a run are of one kind"))]
    #[case(
        "flex:1",
        None,
        Err("device `flex:1`: expected a number under 1, that of flex devices here")
    )]
    #[case(
        "flex:x",
        None,
        Err("device `flex:x`: expected a number under 1, that of flex devices here")
    )]
    fn devices_and_strategies(
        #[case] list: &str,
        #[case] asked: Option<Strategy>,
        #[case] expected: Result<usize, &str>,
    ) {
        let found = open(&names(list)).and_then(|devices| {
            let count = match strategy(asked, "flex", &devices)? {
                ExecutionStrategy::MultiDevice(devices, _) => devices.len(),
                _ => 1,
            };
            Ok(count)
        });
        assert_eq!(found.map_err(|error| error.to_string()), expected.map_err(str::to_owned));
    }
}
