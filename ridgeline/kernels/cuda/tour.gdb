# A tour of cuda-gdb: a kernel that is stopped, and one that faults. docs/kernels/inside.md reads it.
#   cuda-gdb --batch -x ridgeline/kernels/cuda/tour.gdb --args python -m ridgeline_bench.scripts.sanitized \
#     --child --kernels memory_bound:transpose-padded --faulty faulty_memory
set pagination off
set confirm off
set breakpoint pending on
set cuda break_on_launch none
handle SIGUSR1 nostop noprint
# 1. Stop where the first block of the transpose begins, and look at what the GPU runs.
tbreak transpose
run
echo \n== which kernels, blocks and warps are there\n
info cuda kernels
info cuda blocks
info cuda warps
# 2. Follow one thread: lane 1 of the second warp of block 3.
echo \n== one thread: its place, its instruction, its registers\n
cuda block 3,0,0 thread 1,1,0
cuda kernel block thread sm warp lane
x/6i $pc
stepi 12
info registers $R0 $R1 $R2 $R3
info line *$pc
# 3. Shared memory and special registers, as this thread sees them.
echo \n== its shared memory\n
x/8xw (@shared int*)0
print blockIdx
print threadIdx
# 4. Go on to the kernel that writes behind the end of its memory.
echo \n== the fault: which thread, which address, which instruction\n
continue
info cuda kernels
info cuda lanes
cuda kernel block thread sm warp lane
print $errorpc
x/2i $errorpc
