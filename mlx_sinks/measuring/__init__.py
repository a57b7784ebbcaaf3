"""What commands and benches both measure."""
