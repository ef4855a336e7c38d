// Tables of training runs (CSV, one run per row) to jobs, and predictions for them.
#pragma once

#include <iosfwd>
#include <map>
#include <string>
#include <vector>

#include "weft/cost/tuning.h"
#include "weft/plan/estimate.h"
#include "weft/plan/job.h"

namespace weft::plan {

/// One row by column name; missing columns and blanks read as "".
class RunRow {
 public:
  explicit RunRow(std::map<std::string, std::string> fields) : fields_(std::move(fields)) {}
  const std::string& text(const std::string& column) const;
  /// Number in `column`, or `otherwise` when blank. Throws ConfigError for text that is no number.
  double number(const std::string& column, double otherwise = 0) const;
  int64_t integer(const std::string& column, int64_t otherwise = 0) const;

 private:
  std::map<std::string, std::string> fields_;
};

/// Reads a CSV file with a header line; quoted fields may hold commas and doubled quotes. Throws ConfigError with the line.
std::vector<RunRow> read_runs(const std::string& path);

/// The job of a row. Columns: layers, hidden, ffn_hidden, heads, kv_heads, head_dim, vocab, experts, ..., gpu, tp, pp, ...
/// Blank columns get the family's usual value; `assumptions` says which. Throws ConfigError if a required one is missing.
Job job_of_run(const RunRow& row, std::vector<std::string>& assumptions);

/// Prediction of a row, or the reason why there is none.
struct RunPrediction {
  std::string id;
  double step_time_s = 0;
  double peak_mem_gib = 0;
  double p_fit = 0;
  std::string reason;       ///< non-empty: no prediction
  std::string assumptions;
};

RunPrediction predict_run(const RunRow& row, const cost::Tuning& tuning);

/// Writes id,step_time_s,peak_mem_gb,fits,p_fit,reason.
void write_predictions(std::ostream& out, const std::vector<RunPrediction>& predictions);

}  // namespace weft::plan
