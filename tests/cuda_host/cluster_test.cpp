#include <gtest/gtest.h>

#include <vector>

#include "cuda_host/cuda_host.h"
// After cuda_host.h
#include "cuda/kernels/global_memory.cuh"
#include "cuda/kernels/ptx.cuh"

namespace gyre::test {
namespace {

constexpr uint32_t kCluster = 4, kThreads = 48, kRounds = 3, kWarpThreads = 32;

uint32_t block_number() { return (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x; }

float written(uint32_t block, uint32_t thread, uint32_t round) {
  return static_cast<float>((block * kThreads + thread) * kRounds + round);
}

template <class T>
T load(const T* mine, uint32_t rank) {
  return *static_cast<const T*>(cuda_host::cluster_pointer(mine, rank));
}

// Every thread reads, from every block, what another thread wrote; blocks come to the cluster's
// barrier after more or fewer barriers of their own. The second barrier of a round keeps what is
// read from the next round's writes, and the last one's blocks from ending.
void read_all(float* out) {
  cuda::pdl_wait();
  auto* const mine = reinterpret_cast<float*>(cuda::dynamic_shared());
  const uint32_t rank = cuda_host::cluster_rank();
  for (uint32_t round = 0; round < kRounds; ++round) {
    for (uint32_t i = 0; i < (rank + round) % kCluster; ++i) __syncthreads();
    mine[threadIdx.x] = written(block_number(), threadIdx.x, round);
    cuda_host::cluster_wait();
    for (uint32_t r = 0; r < cuda_host::cluster_size(); ++r) {
      const uint32_t other = (threadIdx.x + 1 + r) % kThreads;
      out[((block_number() * kThreads + threadIdx.x) * kRounds + round) * kCluster + r] =
          load(mine + other, r);
    }
    cuda_host::cluster_wait();
  }
}

TEST(ClusterHost, BlocksReadEachOther) {
  const dim3 grid(8, 1, 2);
  const uint32_t blocks = grid.x * grid.y * grid.z;
  std::vector<float> out(blocks * kThreads * kRounds * kCluster, -1.0f);
  cuda_host::launch_clusters(grid, kCluster, kThreads, kThreads * sizeof(float), read_all,
                             out.data());
  size_t at = 0;
  for (uint32_t block = 0; block < blocks; ++block) {
    for (uint32_t thread = 0; thread < kThreads; ++thread) {
      for (uint32_t round = 0; round < kRounds; ++round) {
        for (uint32_t r = 0; r < kCluster; ++r, ++at) {
          const uint32_t from = block / kCluster * kCluster + r;
          ASSERT_EQ(out[at], written(from, (thread + 1 + r) % kThreads, round))
              << "block " << block << " thread " << thread << " round " << round << " rank " << r;
        }
      }
    }
  }
}

// In each block other threads leave, some at once and some while the rest wait already: nobody who
// has left is waited for.
bool leaves(uint32_t rank, uint32_t thread) {
  return (thread + rank) % 3 == 0 || thread < 8 * rank;
}

void leave_early(float* out) {
  cuda::pdl_wait();
  auto* const mine = reinterpret_cast<float*>(cuda::dynamic_shared());
  const uint32_t rank = cuda_host::cluster_rank();
  mine[threadIdx.x] = written(block_number(), threadIdx.x, 0);
  if (leaves(rank, threadIdx.x)) {
    for (uint32_t i = 0; i < threadIdx.x % 4; ++i) cuda_host::yield();
    mine[threadIdx.x] += 1;
    return;
  }
  cuda_host::cluster_wait();
  const uint32_t next = (rank + 1) % cuda_host::cluster_size();
  out[block_number() * kThreads + threadIdx.x] = load(mine + threadIdx.x, next);
  cuda_host::cluster_wait();
}

TEST(ClusterHost, ThreadsThatHaveEndedAreNotWaitedFor) {
  std::vector<float> out(8 * kThreads, -1.0f);
  cuda_host::launch_clusters(dim3(8), kCluster, kThreads, kThreads * sizeof(float), leave_early,
                             out.data());
  for (uint32_t block = 0; block < 8; ++block) {
    const uint32_t rank = block % kCluster, next = (rank + 1) % kCluster;
    for (uint32_t thread = 0; thread < kThreads; ++thread) {
      const float stored = written(block - rank + next, thread, leaves(next, thread) ? 1 : 0);
      ASSERT_EQ(out[block * kThreads + thread], leaves(rank, thread) ? -1.0f : stored)
          << "block " << block << " thread " << thread;
    }
  }
}

void read_vectors(float* out) {
  cuda::pdl_wait();
  auto* const mine = reinterpret_cast<float4*>(cuda::dynamic_shared());
  const auto number = static_cast<float>(block_number());
  mine[1] = make_float4(number, number + 0.25f, number + 0.5f, number + 0.75f);
  cuda_host::cluster_wait();
  const uint32_t other = cuda_host::cluster_rank() ^ 1;
  const float4 four = load(mine + 1, other);
  const float2 two = load(reinterpret_cast<const float2*>(mine + 1) + 1, other);
  const float got[] = {four.x, four.y, four.z, four.w, two.x, two.y};
  std::copy(got, got + 6, out + 6 * block_number());
  cuda_host::cluster_wait();
}

TEST(ClusterHost, ReadsVectors) {
  std::vector<float> out(4 * 6, -1.0f);
  cuda_host::launch_clusters(dim3(4), 2, 1, 2 * sizeof(float4), read_vectors, out.data());
  for (uint32_t block = 0; block < 4; ++block) {
    const auto number = static_cast<float>(block ^ 1);
    const std::vector<float> expected = {number,         number + 0.25f, number + 0.5f,
                                         number + 0.75f, number + 0.5f,  number + 0.75f};
    EXPECT_EQ(std::vector<float>(out.begin() + 6 * block, out.begin() + 6 * block + 6), expected);
  }
}

// Every block but the last pushes two numbers to the one after it, some of them late.
void push_to_the_next(float* out) {
  cuda::pdl_wait();
  auto* const room = reinterpret_cast<float*>(cuda::dynamic_shared());
  auto* const barrier = reinterpret_cast<cuda::TransactionBarrier*>(room + 2 * kWarpThreads);
  const uint32_t rank = cuda::cluster_rank();
  if (threadIdx.x == 0) cuda::expect_transactions(barrier, rank == 0 ? 0 : kWarpThreads * 8);
  cuda::cluster_arrive();
  cuda::cluster_wait();
  for (uint32_t i = 0; i < 3 * (kCluster - rank); ++i) cuda_host::yield();
  const float x = written(block_number(), threadIdx.x, 0);
  if (rank + 1 < kCluster)
    cuda::dsmem_store(make_float2(x, -x), room + 2 * threadIdx.x, barrier, rank + 1);
  if (rank == 0) return;
  cuda::wait_for_transactions(barrier);
  const uint32_t other = kWarpThreads - 1 - threadIdx.x;
  out[block_number() * kWarpThreads + threadIdx.x] = room[2 * other] - room[2 * other + 1];
}

TEST(ClusterHost, BlocksWaitForWhatIsPushed) {
  std::vector<float> out(8 * kWarpThreads, -1.0f);
  cuda_host::launch_clusters(dim3(8), kCluster, kWarpThreads, 2 * kWarpThreads * sizeof(float) + 8,
                             push_to_the_next, out.data());
  for (uint32_t block = 0; block < 8; ++block) {
    for (uint32_t thread = 0; thread < kWarpThreads; ++thread) {
      const float pushed = 2 * written(block - 1, kWarpThreads - 1 - thread, 0);
      ASSERT_EQ(out[block * kWarpThreads + thread], block % kCluster == 0 ? -1.0f : pushed)
          << "block " << block << " thread " << thread;
    }
  }
}

constexpr uint32_t kWarps = 4, kPhases = 5;

// When each warp came through each phase, phases being what lies between two barriers.
void note_times(uint32_t* now, uint32_t* out) {
  cuda::pdl_wait();
  for (uint32_t phase = 0; phase < kPhases; ++phase) {
    if (threadIdx.x % kWarpThreads == 0)
      out[(blockIdx.x * kPhases + phase) * kWarps + threadIdx.x / kWarpThreads] = (*now)++;
    __syncthreads();
  }
}

// Else a barrier could be missing and not show: what warp a writes for warp b.
TEST(ClusterHost, InEveryPhaseEachWarpIsAheadOfEachInSomeBlock) {
  constexpr uint32_t kBlocks = 2 * kWarps;
  std::vector<uint32_t> times(kBlocks * kPhases * kWarps);
  uint32_t now = 0;
  cuda_host::launch(dim3(kBlocks), kWarps * kWarpThreads, 0, note_times, &now, times.data());
  EXPECT_EQ(now, times.size());
  for (uint32_t phase = 0; phase < kPhases; ++phase) {
    for (uint32_t a = 0; a < kWarps; ++a) {
      for (uint32_t b = 0; b < kWarps; ++b) {
        bool ahead = a == b;
        for (uint32_t block = 0; block < kBlocks; ++block) {
          const uint32_t* const of = &times[(block * kPhases + phase) * kWarps];
          ahead = ahead || of[a] < of[b];
        }
        EXPECT_TRUE(ahead) << "phase " << phase << ": " << a << " before " << b;
      }
    }
  }
}

void describe(uint32_t* out) {
  cuda::pdl_wait();
  out[2 * blockIdx.x] = cuda_host::cluster_rank();
  out[2 * blockIdx.x + 1] = cuda_host::cluster_size();
}

TEST(ClusterHost, APlainLaunchHasClustersOfOne) {
  std::vector<uint32_t> out(2 * 3, 9);
  cuda_host::launch(dim3(3), 1, 0, describe, out.data());
  EXPECT_EQ(out, (std::vector<uint32_t>{0, 1, 0, 1, 0, 1}));
}

TEST(ClusterHost, RefusesAGridThatIsNotAMultiple) {
  std::vector<uint32_t> out(2 * 8, 9);
  EXPECT_THROW(cuda_host::launch_clusters(dim3(6), 4, 1, 0, describe, out.data()),
               std::invalid_argument);
  EXPECT_THROW(cuda_host::launch_clusters(dim3(6), 0, 1, 0, describe, out.data()),
               std::invalid_argument);
  EXPECT_EQ(out, std::vector<uint32_t>(2 * 8, 9));
}

void read_place(uint32_t offset, uint32_t rank) {
  cuda::pdl_wait();
  load(reinterpret_cast<const float*>(cuda::dynamic_shared()) + offset, rank);
  cuda_host::cluster_wait();
}
void read_after_the_end() {
  cuda::pdl_wait();
  if (cuda_host::cluster_rank() != 1) return;
  for (int i = 0; i < 3; ++i) cuda_host::yield();
  load(reinterpret_cast<const float*>(cuda::dynamic_shared()), 0);
}

TEST(ClusterHost, RefusesWhatIsNotThere) {
  const size_t bytes = 2 * sizeof(float);
  EXPECT_NO_THROW(cuda_host::launch_clusters(dim3(2), 2, 1, bytes, read_place, 1u, 1u));
  EXPECT_THROW(cuda_host::launch_clusters(dim3(2), 2, 1, bytes, read_place, 2u, 1u),
               std::out_of_range);
  EXPECT_THROW(cuda_host::launch_clusters(dim3(2), 2, 1, bytes, read_place, 1u, 2u),
               std::out_of_range);
  EXPECT_THROW(cuda_host::launch_clusters(dim3(2), 2, 1, bytes, read_after_the_end),
               std::out_of_range);
}

}  // namespace
}  // namespace gyre::test
