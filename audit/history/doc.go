// Package history keeps the page history that workers deliver (see
// engine/history) and answers who had a page when.
package history
