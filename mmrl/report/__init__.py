"""What a run leaves behind for people: metrics, TensorBoard, tables of samples."""
