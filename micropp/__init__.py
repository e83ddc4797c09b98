"""The pipeline library: schedules as data, and what it takes to run them exactly and to measure them."""
