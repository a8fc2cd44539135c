// Products of one input with matrices of two encodings in one launch: a few tiles of the one would not fill the device.
// `first` and `second` are products.cuh with one encoding each. The first `split` workers have the first's tiles.

#define MULTIPLY(name, NT, MT, RESIDENT)                                                                                    \
    extern "C" __global__ void __launch_bounds__(SEGMENTS* WARP, RESIDENT)                                                  \
        name(Parts a_parts, u32 n_a, u32 a_tiles, Parts b_parts, u32 n_b, u32 b_tiles, u32 split, u32 n_blocks,             \
             Activations a, Epilogue epilogue, u32 is_late) {                                                               \
        const u32 worker = blockIdx.y;                                                                                      \
        if (worker < split)                                                                                                 \
            first::multiply<NT, MT>(a_parts, n_a, a_tiles, worker, split, n_blocks, a, epilogue, is_late);                  \
        else                                                                                                                \
            second::multiply<NT, MT>(b_parts, n_b, b_tiles, worker - split, gridDim.y - split, n_blocks, a, epilogue,       \
                                     is_late);                                                                              \
    }
MULTIPLY(multiply_8, 1, 1, 6)
MULTIPLY(multiply_16, 2, 1, 4)
MULTIPLY(multiply_16_wide, 2, 2, 3)
MULTIPLY(multiply_32, 4, 2, 2)

#if defined(HAS_DIGITS) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
extern "C" __global__ void __launch_bounds__(first::WIDE_THREADS, 1)
    multiply_wide(Parts a_parts, u32 n_a, u32, Parts b_parts, u32 n_b, u32, u32 split, u32 n_blocks, Activations a,
                  Epilogue epilogue, u32) {
    const u32 group = blockIdx.y;
    if (group < split) first::multiply_128(a_parts, n_a, group, n_blocks, a, epilogue);
    else second::multiply_128(b_parts, n_b, group - split, n_blocks, a, epilogue);
}
#endif
