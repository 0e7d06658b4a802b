package token_test

import (
	"strings"
	"testing"
	"time"

	"bulkhead.dev/infra/apperr"
	"bulkhead.dev/infra/assert"
	"bulkhead.dev/tenancy/token"
)

func TestValidate(t *testing.T) {
	t.Parallel()
	good := token.Issuer{ID: "one", Tenant: tenantA, URL: "https://id.example.com/realms/one", Audience: "bulkhead", Algorithms: []string{"RS256"},
		ClockSkew: time.Minute, Claims: token.Mapping{Subject: "oid", Email: "email", Roles: "https://example.com/roles",
			RoleNames: map[string]string{"a": "b"}, Required: map[string]string{"/org/id": "acme"}}}
	assert.NoError(t, good.Validate())
	long := strings.Repeat("x", 600)
	bad := map[string]func(*token.Issuer){
		"id":                  func(i *token.Issuer) { i.ID = "" },
		"audience":            func(i *token.Issuer) { i.Audience = "" },
		"algorithms":          func(i *token.Issuer) { i.Algorithms = []string{"RS256", "HS256"} },
		"clock_skew":          func(i *token.Issuer) { i.ClockSkew = token.MaxClockSkew + 1 },
		"claims.subject":      func(i *token.Issuer) { i.Claims.Subject = "/a/b/c/d/e" },
		"claims.email":        func(i *token.Issuer) { i.Claims.Email = "/a~2" },
		"claims.roles":        func(i *token.Issuer) { i.Claims.Roles = long },
		"claims.role_names":   func(i *token.Issuer) { i.Claims.RoleNames = nil },
		"claims.role_names ":  func(i *token.Issuer) { i.Claims.RoleNames = map[string]string{"": "a"} },
		"claims.required":     func(i *token.Issuer) { i.Claims.Required = map[string]string{"a": ""} },
		"url":                 func(i *token.Issuer) { i.URL = "" },
		"url ":                func(i *token.Issuer) { i.URL = "http://id.example.com" },
		"url  ":               func(i *token.Issuer) { i.URL = token.PlatformIssuer },
		"url   ":              func(i *token.Issuer) { i.URL = "https://u:p@id.example.com" },
		"url    ":             func(i *token.Issuer) { i.URL = "https://id.example.com?a" },
		"url     ":            func(i *token.Issuer) { i.URL = "https://id.example.com#a" },
		"url      ":           func(i *token.Issuer) { i.URL = "https://id.example.com/" + long },
		"url       ":          func(i *token.Issuer) { i.URL = "http://10.0.0.1" },
		"url        ":         func(i *token.Issuer) { i.URL = "file:///etc/passwd" },
		"url         ":        func(i *token.Issuer) { i.URL = "http://127.0.0.1.example.com" },
		"url          ":       func(i *token.Issuer) { i.URL = "https://:443" },
		"clock_skew ":         func(i *token.Issuer) { i.ClockSkew = -1 },
		"claims.required  ":   func(i *token.Issuer) { i.Claims.Required = map[string]string{"": "a"} },
		"claims.role_names  ": func(i *token.Issuer) { i.Claims.Roles = "" },
	}
	for field, change := range bad {
		is := good
		change(&is)
		e := assert.ErrorAs[*apperr.Error](t, is.Validate())
		assert.Equal(t, e.Kind, apperr.Invalid)
		assert.Equal(t, e.Param, strings.TrimSpace(field))
	}
	for _, url := range []string{"http://127.0.0.1:8080", "http://localhost/a", "http://[::1]:80"} {
		good.URL = url
		assert.NoError(t, good.Validate())
	}
}

func TestOverlaps(t *testing.T) {
	t.Parallel()
	is := func(url, audience string, required map[string]string) token.Issuer {
		return token.Issuer{URL: url, Audience: audience, Claims: token.Mapping{Required: required}}
	}
	one := is("https://a", "x", map[string]string{"org": "acme"})
	assert.True(t, one.Overlaps(one))
	assert.True(t, one.Overlaps(is("https://a", "x", nil)))
	assert.True(t, is("https://a", "x", nil).Overlaps(one))
	assert.True(t, one.Overlaps(is("https://a", "x", map[string]string{"dep": "acme"})))
	assert.False(t, one.Overlaps(is("https://a", "x", map[string]string{"org": "other"})))
	assert.False(t, one.Overlaps(is("https://a", "y", nil)))
	assert.False(t, one.Overlaps(is("https://a/", "x", nil)))
}
