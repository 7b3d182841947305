"""What a run is told to do: settings, plan, stages."""
