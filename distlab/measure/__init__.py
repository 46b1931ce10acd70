"""Where prediction meets measurement: ratios of programs, this machine's calibration, predicted against measured."""
