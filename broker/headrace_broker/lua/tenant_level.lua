-- How many messages of one tenant a queue holds, read and nothing written.
-- KEYS: WAITING, DELAYED_TENANTS, TENANT_IDS[]
-- ARGV: tenant, of_interest, lists[]
-- TENANT_IDS, lists: one a level. Returns {count of those that wait, delayed, microseconds since when the
-- longest of those that are sorted waits, or '', microseconds now}.
-- Unsorted messages are looked at only where the count may be reached with them, and a thousand at most. The lists are not
-- in KEYS, as a user that may not read messages would then be refused the whole script: it counts what is sorted.
local LOOKED_AT, LOOKED_AT_BYTES, CHUNK = 1000, 4 * 1024 * 1024, 50

local count = tonumber(redis.call('ZSCORE', WAITING, tenant) or 0)
local delayed = tonumber(redis.call('ZSCORE', DELAYED_TENANTS, tenant) or 0)
local unsorted, oldest = 0, nil
for i, list in ipairs(lists) do
  unsorted = unsorted + redis.call('LLEN', list)
  local since = tonumber(redis.call('ZRANGE', TENANT_IDS[i], 0, 0, 'WITHSCORES')[2] or nil)
  if since and since < (oldest or math.huge) then oldest = since end
end

if count + delayed + unsorted >= tonumber(of_interest) then
  local left, bytes_left = LOOKED_AT, LOOKED_AT_BYTES
  for _, list in ipairs(lists) do
    local last = -1
    local may_read = redis.acl_check_cmd('LRANGE', list, last, last)
    while may_read and left > 0 and bytes_left > 0 do
      local bodies = redis.call('LRANGE', list, last - CHUNK + 1, last)
      if #bodies == 0 then break end
      for _, body in ipairs(bodies) do
        bytes_left = bytes_left - #body
        if tenant_of(body) == tenant then count = count + 1 end
      end
      left, last = left - #bodies, last - CHUNK
    end
  end
end
local time = redis.call('TIME')
return {count, delayed, oldest and string.format('%.0f', oldest) or '', string.format('%.0f', time[1] * 1000000 + time[2])}
