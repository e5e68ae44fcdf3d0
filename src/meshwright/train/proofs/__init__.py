"""What is proven of a layout: claims, the records of audits, and the pages that come with the package."""
