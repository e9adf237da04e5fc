"""Knowledge of a server while it runs: metrics, where requests' time went, traces, stalls, the dashboard."""
