#pragma once

#include "cpu/attention/isa/kernels.h"

namespace gyre::cpu {

constexpr uint32_t kAmxFewRows = 8;  // rows whose hi and lo fill the 16 columns or rows of a tile

// For up to kAmxFewRows rows. The first makes columns of queries, which the second reads.
void amx_arrange_few_rows(int8_t* q, uint32_t rows, uint32_t row_levels);
void amx_score_few_rows(const ScoreJob& job);
void amx_accumulate_few_rows(const AccumulateJob& job);

}  // namespace gyre::cpu
