"""The pipeline library under the course: schedules, timelines, stages and how they talk to each other."""
