"""What a run says of itself: metrics, trackers, the console line, spans, and the measured report."""
