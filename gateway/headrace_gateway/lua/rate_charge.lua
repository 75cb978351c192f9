-- KEYS[1]: the token buckets of an API key, a hash. KEYS[2]: tokens charged so far for one answer.
-- ARGV: tokens per minute, tokens of the answer so far, seconds for which KEYS[2] is kept.
-- An answer that is read twice, or by two replicas, is charged once.
local charged = tonumber(redis.call('GET', KEYS[2]) or '0') or 0
if tokens <= charged then
  return 0
end
redis.call('SET', KEYS[2], tokens, 'EX', ARGV[3])
keep({tokens = level_of('tokens', bound) - (tokens - charged)}, {tokens = bound})
return tokens - charged
