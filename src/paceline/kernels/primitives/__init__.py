"""What ops share, below all of them: packed linears, the shape of a pass, rotation, the residual stream, the choice of implementations."""
