"""Released models in use: exports, MLflow's model, predictions on raw rows."""
