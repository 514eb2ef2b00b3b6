"""Long sessions in small windows: old tool outputs shrink, then the model sums up; `extension` lets a `Crow` use it."""
