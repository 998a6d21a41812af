"""What a pipeline's coming steps look like: sub-stages, their costs, and how they get on side by side. No torch."""
