#include "weft/plan/campaign.h"

#include <fmt/format.h>

#include <algorithm>

#include "weft/core/units.h"
#include "weft/cost/goodput.h"

namespace weft::plan {

Campaign campaign(const Job& job, const Estimate& estimate, const CampaignInput& input) {
  Campaign out;
  const double devices = static_cast<double>(job.layout.devices());
  out.tokens = input.tokens;
  out.train_s = input.tokens / estimate.tokens_per_second;
  out.failure_s = cost::mean_time_to_failure(devices, input.device_mttf_s);
  // Daly's interval turns negative when a save takes longer than twice the time between failures.
  out.interval_s = std::max(input.save_s, cost::daly_interval(input.save_s, out.failure_s));
  out.effective = cost::effective_time(out.interval_s, input.save_s, input.restart_s, out.failure_s);
  out.wall_s = out.train_s / out.effective;
  out.failures = out.wall_s / out.failure_s;
  out.device_hours = out.wall_s / 3600 * devices;
  out.compute_optimal_tokens = cost::compute_optimal_tokens(job.model.total_parameters);
  return out;
}

std::string campaign_text(const Campaign& campaign, const Rates& rates) {
  std::string out = fmt::format("\nTraining on {} tokens\n", count_text(campaign.tokens));
  out += fmt::format("  {} with failures and checkpoints ({} without); {} device-hours\n", seconds_text(campaign.wall_s), seconds_text(campaign.train_s), count_text(campaign.device_hours));
  out += fmt::format("  a failure every {} ({:.0f} expected); save every {}; {:.1f}% of the time trains\n", seconds_text(campaign.failure_s), campaign.failures, seconds_text(campaign.interval_s), 100 * campaign.effective);
  if (rates.price > 0) out += fmt::format("  price {}\n", count_text(campaign.device_hours * rates.price));
  if (rates.watts > 0) out += fmt::format("  energy {} kWh\n", count_text(campaign.device_hours * rates.watts / 1000));
  out += fmt::format("  hint: 20 tokens per parameter, the best use of a training budget, would be {}\n", count_text(campaign.compute_optimal_tokens));
  return out;
}

Json campaign_json(const Campaign& campaign, const Rates& rates) {
  Json out = {{"tokens", campaign.tokens}, {"train_s", campaign.train_s}, {"wall_s", campaign.wall_s}, {"mean_time_between_failures_s", campaign.failure_s}, {"checkpoint_interval_s", campaign.interval_s},
              {"effective_time", campaign.effective}, {"failures", campaign.failures}, {"device_hours", campaign.device_hours}};
  if (rates.price > 0) out["price"] = campaign.device_hours * rates.price;
  if (rates.watts > 0) out["energy_kwh"] = campaign.device_hours * rates.watts / 1000;
  return out;
}

}  // namespace weft::plan
