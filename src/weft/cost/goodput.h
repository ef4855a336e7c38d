// What failures and checkpoints leave of the training time, and what a run costs.
#pragma once

namespace weft::cost {

/// Seconds between checkpoints that lose least: sqrt(2 d M) (Young 1974). d: seconds a save blocks; M: mean seconds between failures.
double young_interval(double save, double failure);
/// The second order of Daly 2006.
double daly_interval(double save, double failure);

/// Share of wall time that trains: 1 / (1 + d/t + (R + t/2 + d) / M). R: seconds from a failure to the first new step.
double effective_time(double interval, double save, double restart, double failure);

/// Mean time between failures of a job, in the unit of `device_mttf`: that of one device over their number.
double mean_time_to_failure(double devices, double device_mttf);

/// Device-hours for `flops` at `rate` FLOP/s per device.
double device_hours(double flops, double rate);

/// 20 tokens per parameter (Hoffmann et al. 2022): a hint for the best use of a budget, not a rule.
double compute_optimal_tokens(double parameters);

/// Expected largest of n standard normal values: z - (ln ln n + ln 4 pi) / (2 z), z = sqrt(2 ln n).
double expected_maximum(double n);

}  // namespace weft::cost
