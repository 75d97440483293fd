"""Guards: each watches a metric and acts when the metric leaves its band."""
