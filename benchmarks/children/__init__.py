"""Programs that the benchmarks start and measure; they import little, so that little but them is measured."""
