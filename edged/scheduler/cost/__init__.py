"""What a bin will take: prices, their fit and their errors."""
