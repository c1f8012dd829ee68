"""The torch reference: obviously right, any device."""
