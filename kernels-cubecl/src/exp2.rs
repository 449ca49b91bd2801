//! `2^x`, and the instruction that NVIDIA's GPUs have for it.
//!
//! CubeCL knows `exp` alone. Of that, NVIDIA's library makes `ex2` and seven instructions around it, twice
//! what the rest of a softmax takes; so the operation is added to CubeCL's own, with what its two compilers
//! for CUDA make of it.

use core::f32::consts::LN_2;

use cubecl::prelude::*;

/// `2^x`, on any device.
#[cube]
pub(crate) fn exp2(x: f32) -> f32 {
    f32::exp(x * LN_2)
}

/// `2^x`, on NVIDIA's GPUs, by `ex2.approx.ftz.f32`: off by at most 2 ulp, with 0 for what is less than
/// the least normal number ([PTX ISA](https://docs.nvidia.com/cuda/parallel-thread-execution/#floating-point-instructions-ex2)).
#[cfg(feature = "nvidia")]
#[cube]
pub(crate) fn exp2_nvidia(x: f32) -> f32 {
    intrinsic!(|scope| {
        let x = x.read_value(scope);
        let op = instruction::Exp2Op::new(scope.ctx_mut(), x);
        scope.register_with_result(&op).into()
    })
}

/// Without the feature `nvidia` kernels for these GPUs are right, and slower.
#[cfg(not(feature = "nvidia"))]
pub(crate) use exp2 as exp2_nvidia;

#[cfg(feature = "nvidia")]
mod instruction {
    use cubecl::ir::{
        CanMaterialize, PropagatesUniformity, Pure, Scope, interfaces::TriviallyUnrollable,
        prelude::*,
    };
    use cubecl_cpp::{cuda::ptx::InlinePtxOp, shared::lowering::LowerOp, target::Cuda};
    use cubecl_llvm::shared::{intrinsic::call_op, to_llvm::ToLLVMDialect};
    use pliron::{r#type::Typed, value::Value};

    /// `2^input`, of f32.
    #[cube_op(name = "vision_attention.exp2")]
    #[result_ty(same_as = input)]
    #[op_interfaces(SameOperandsType, SameOperandsAndResultType, TriviallyUnrollable)]
    #[op_traits(CanMaterialize, Pure, PropagatesUniformity)]
    pub struct Exp2Op {
        pub input: Value,
    }

    #[op_interface_impl]
    impl ToLLVMDialect for Exp2Op {
        fn rewrite(
            &self,
            ctx: &mut Context,
            rewriter: &mut DialectConversionRewriter,
            _operands_info: &OperandsInfo,
        ) -> Result<()> {
            let input = self.input(ctx);
            let ty = input.get_type(ctx);
            let op = call_op(ctx, "llvm.nvvm.ex2.approx.ftz.f32", ty, vec![input]);
            rewriter.insert_op(ctx, &op);
            rewriter.replace_operation_with_values(
                ctx,
                self.get_operation(),
                vec![op.get_result(ctx)],
            );
            Ok(())
        }
    }

    #[op_interface_impl]
    impl LowerOp<Cuda> for Exp2Op {
        fn lower(&self, scope: &Scope) -> Vec<Value> {
            let input = self.input(scope.ctx());
            let ty = input.get_type(scope.ctx());
            let ptx = "ex2.approx.ftz.f32 $0, $1;";
            let op = InlinePtxOp::new(scope.ctx_mut(), Some(ty), ptx, vec![input]);
            scope.register(&op);
            vec![op.result(scope.ctx()).expect("an instruction with a result")]
        }
    }
}
